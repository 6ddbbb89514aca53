"""This computer → its Machine, with cached rates; and a model folder → the plan to load it under."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from tightfit.apply.weights.host_overheads import layer_overheads
from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.devices.choose import choose_device, find_machine
from tightfit.devices.device import Device
from tightfit.devices.memory import resident_bytes, trim_heap
from tightfit.devices.ram import group_memory, held_bytes
from tightfit.errors import BudgetTooSmall, InputError, RequestError
from tightfit.files import replacing
from tightfit.measure.equal_cards import with_equal_rates
from tightfit.measure.kept_rates import kept_file, known_accelerator, machine_key, read_kept
from tightfit.measure.modules import find_components, weight_tensors
from tightfit.measure.rates import Progress, measure_rates
from tightfit.plan.component_cost import round_up
from tightfit.progress import showing
from tightfit.run.argument_values import Given
from tightfit.run.cache_choice import plan_with_cache
from tightfit.run.calibrated_caches import with_calibrations
from tightfit.run.calibration import PlanningInputs, forget, measured
from tightfit.run.call_arguments import request_of_example
from tightfit.run.footprints import Measurer
from tightfit.run.limits import Limits
from tightfit.run.plan_target import PlanTarget
from tightfit.run.unmeasured import plan_unmeasured, with_reason
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.step_cache import StepCache

__all__ = [
    "PlannedFolder",
    "bytes_on",
    "machine_now",
    "machine_of",
    "measured_machine",
    "plan_within",
    "with_garbage_freed",
    "with_less_taken",
    "with_taken",
    "within_group",
]


QUANTUM = 512  # bytes: a card's allocator rounds sizes up to a multiple of this
_OVERHEADS = "launch_overhead", "module_overhead", "streamed_overhead", "resident_overhead"
_RATES = (
    *_OVERHEADS, "arithmetic_rates", "memory_rate", "link_rate", "link_rate_out", "channels_last_gains",
    "multiprocessors", "clock", "tail", "cache_bytes", "cache_rate", "kernel_latency",
)  # fmt: skip


def bytes_on(target: Device, pipe: Any) -> int:
    """Bytes of the memory of `target` that the weights of `pipe` take now."""
    tensors = [tensor for module in find_components(pipe).values() for tensor in weight_tensors(module)]
    on_device = [tensor for tensor in tensors if tensor.device == target.torch_device]
    if not target.separate:
        return resident_bytes(on_device)
    return sum(round_up(tensor.nbytes, QUANTUM) for tensor in on_device)


def measured_machine(*, again: bool = False, on_progress: Progress = lambda name, done, total: None) -> Machine:
    """Return this computer: its devices, its memory that is free now, and its rates.

    Rates are measured if none are cached, or if `again`: this takes up to 20 s, and `on_progress` called at each step.
    `again` also deletes the stored measurements of calls.
    """
    if again:
        forget()
    machine, file = find_machine(), kept_file()
    key, kept = machine_key(machine), read_kept()
    rated = None if again else _rated(kept.get(key), machine)
    if rated is not None:
        return rated
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):  # layers that are measured draw their weights
        rated = with_equal_rates(_with_overheads(measure_rates(machine, file.parent, on_progress)))
    with contextlib.suppress(OSError), replacing(file) as partial:
        partial.write_text(json.dumps(kept | {key: rated.to_mapping()}))
    return rated


def _with_overheads(machine: Machine) -> Machine:
    """`machine` with the host's seconds for each layer of its cards.

    What the host does is the same for all cards: they have the least that was measured, so that no card seems faster.
    """
    cards: dict[str, Accelerator] = {}
    for each in machine.accelerators:
        if (device := choose_device(each.name)).separate:
            streamed, resident = layer_overheads(device, each.launch_overhead)
            found = {"streamed_overhead": streamed, "resident_overhead": resident}
            cards[each.name] = each.model_copy(update=found)
    least = {
        field: min(filter(None, (getattr(card, field) for card in cards.values())), default=0.0) for field in _OVERHEADS
    }
    accelerators = (
        cards[each.name].model_copy(update=least) if each.name in cards else each for each in machine.accelerators
    )
    return machine.model_copy(update={"accelerators": tuple(accelerators)})


def machine_of(*targets: Device) -> Machine:
    """Return this computer with `targets` as its only accelerators.

    Rates of CUDA cards are measured if none are cached; a CPU has cached rates or none, a simulated card its own.
    """
    machine = measured_machine() if targets[0].kind == "cuda" else _known_machine()
    by_name = {accelerator.name: accelerator for accelerator in machine.accelerators}
    accelerators = tuple(by_name.get(each.name) or _accelerator(each) for each in targets)
    return machine.model_copy(update={"accelerators": accelerators, "pinnable": targets[0].pinnable()})


def machine_now(*targets: Device) -> Machine:
    """Return `machine_of(targets)` after unused memory is freed: on a CPU, garbage is collected, the heap trimmed."""
    if not targets[0].separate:
        _free_unused()
    return machine_of(*targets)


def _free_unused() -> None:
    gc.collect()
    trim_heap()


def with_garbage_freed(machine: Machine, target: Device, pipe: Any) -> Machine:
    """Return `machine` with no more of its RAM taken than this process holds now beside the weights of `pipe`.

    Others in the process may have freed memory since `machine` was described.
    """
    if target.separate:
        return machine
    _free_unused()
    beside = max(held_bytes() - bytes_on(target, pipe), 0)
    return with_less_taken(machine, {target.name: max((machine.ram_used or 0) - beside, 0)})


def with_less_taken(machine: Machine, sizes: Mapping[str, int]) -> Machine:
    """Return `machine` with `sizes` bytes more free, and less taken, on its accelerators, by name.

    Negative sizes: less free, and more taken.
    """
    (first, *_), taken = machine.accelerators, machine.ram_used
    accelerators = tuple(_freer(each, sizes.get(each.name, 0)) for each in machine.accelerators)
    if first.is_cpu:
        taken = max((taken or 0) - sizes.get(first.name, 0), 0)
    return machine.model_copy(update={"accelerators": accelerators, "ram_used": taken})


def within_group(machine: Machine) -> Machine:
    """Return `machine` with no more RAM than its control group leaves to this process now, if it has a limit."""
    group, (first, *others) = group_memory(), machine.accelerators
    if group is None or not first.is_cpu:
        return machine
    most = max(held_bytes() + group.free, 1)
    free = max(min(first.bytes if first.free is None else first.free, most - (machine.ram_used or 0)), 0)
    first = first.model_copy(update={"bytes": min(first.bytes, most), "free": free})
    return machine.model_copy(update={"accelerators": (first, *others), "ram_limit": most})


def with_taken(machine: Machine, sizes: Mapping[str, int]) -> Machine:
    """Return `machine` with tensors of this process taking `sizes` bytes of the named accelerators."""
    accelerators = (
        each.model_copy(update={"allocated": sizes[each.name]}) if each.name in sizes else each
        for each in machine.accelerators
    )
    return machine.model_copy(update={"accelerators": tuple(accelerators)})


def _freer(device: Accelerator, size: int) -> Accelerator:
    free = None if device.free is None else max(min(device.free + size, device.bytes), 0)
    taken = None if device.allocated is None else max(device.allocated - size, 0)
    return device.model_copy(update={"free": free, "allocated": taken})


def _accelerator(target: Device) -> Accelerator:
    """The Accelerator of a device that `find_machine` does not list."""
    taken = target.allocated_bytes() if target.separate else None
    now = {"name": target.name, "allocated": taken, "expandable_refused": target.expandable_refused()}
    return known_accelerator(target).model_copy(update=now)


def _known_machine() -> Machine:
    """This computer, with its rates if they are cached."""
    machine = find_machine()
    return _rated(read_kept().get(machine_key(machine)), machine) or machine


def _rated(fields: object, machine: Machine) -> Machine | None:
    """`machine` with the cached rates in `fields`; None if these are not valid for it."""
    with contextlib.suppress(InputError):
        kept = Machine.from_mapping(fields)
        if len(kept.accelerators) == len(machine.accelerators):
            pairs = zip(machine.accelerators, kept.accelerators, strict=True)
            accelerators = tuple(_with_rates(now, then) for now, then in pairs)
            rates = {"accelerators": accelerators, "disk_rate": kept.disk_rate, "notes": kept.notes}
            return machine.model_copy(update=rates)
    return None


def _with_rates(now: Accelerator, then: Accelerator) -> Accelerator:
    return now.model_copy(update={field: getattr(then, field) for field in _RATES})


class PlannedFolder(NamedTuple):
    """A plan and the inputs it was made from, which are None if its call could not be measured."""

    plan: Plan
    planning_inputs: PlanningInputs | None
    limits: Limits  # with calibrations of step caches, if the planner may choose one


def plan_within(
    path: Path, request: Request | None, plan_target: PlanTarget, dtype: str, example: Mapping[str, Any] | None = None
) -> PlannedFolder:
    """Plan a call of the pipeline in the folder `path` for `plan_target`: for `request`, or for the `example` call.

    On a CPU the budget includes what this process holds already, so garbage of the measurement is freed first.
    """
    call_request, given = request or Request(), None
    if example is not None:
        kind = getattr(diffusers, check_folder(path).pipeline_class)
        call_request = request_of_example(object.__new__(kind), example)
        given = Given(example, plan_target.devices[0].torch_device)
    try:
        limits = with_calibrations(plan_target.limits, check_folder(path))
        measurer = Measurer(path, dtype, expandable=plan_target.expandable)

        def inputs_with(cache: StepCache | None) -> PlanningInputs:
            machine = lambda: machine_now(*plan_target.devices)  # noqa: E731
            return measured(measurer, call_request, given, limits, machine, cache)

        with showing("planning", {}):
            return PlannedFolder(*plan_with_cache(limits, inputs_with), limits)
    except BudgetTooSmall:
        raise
    except InputError as error:
        if request is not None or not isinstance(error, RequestError):
            raise
        return _unmeasured(path, call_request, plan_target, dtype, error)
    except Exception as error:  # raised by third-party code
        return _unmeasured(path, call_request, plan_target, dtype, error)


def _unmeasured(path: Path, request: Request, plan_target: PlanTarget, dtype: str, error: Exception) -> PlannedFolder:
    pipe = build_folder(check_folder(path), getattr(torch, dtype))
    unmeasured = with_reason(plan_unmeasured(pipe, plan_target), request, error)
    return PlannedFolder(unmeasured, None, plan_target.limits)
