"""This computer and a model folder → the plan that the folder is loaded for."""

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
from tightfit.devices.memory import trim_heap
from tightfit.errors import InputError, RequestError
from tightfit.files import replacing
from tightfit.measure.kept_rates import kept_file, known_accelerator, machine_key, read_kept
from tightfit.measure.rates import Told, measure_rates
from tightfit.progress import showing
from tightfit.run.argument_values import Given
from tightfit.run.calibration import PlanningInputs, forget, measured
from tightfit.run.call_arguments import asked_by
from tightfit.run.footprints import Measurer
from tightfit.run.plan_target import PlanTarget
from tightfit.run.unmeasured import plan_unmeasured, with_reason
from tightfit.schema.footprint import Request
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.plan import Plan

__all__ = [
    "PlannedFolder",
    "machine_now",
    "machine_of",
    "measured_machine",
    "plan_within",
    "with_less_taken",
    "with_taken",
]


_RATES = (
    "arithmetic_rates", "memory_rate", "link_rate", "link_rate_out", "launch_overhead", "streamed_overhead",
    "resident_overhead", "channels_last_gains",
)  # fmt: skip


def measured_machine(*, again: bool = False, told: Told = lambda name, done, total: None) -> Machine:
    """This computer: what it has, what of it is free now, and its rates.

    Rates are measured where none are kept, or `again`, which takes up to 20 s and is `told` step by step. What runs
    have taught beside the rates is forgotten then.
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
    rated = _with_overheads(measure_rates(machine, file.parent, told))
    with contextlib.suppress(OSError), replacing(file) as partial:
        partial.write_text(json.dumps(kept | {key: rated.to_mapping()}))
    return rated


def _with_overheads(machine: Machine) -> Machine:
    """`machine` with what its host does for layers whose weights come and go to its cards."""
    accelerators = list(machine.accelerators)
    for index, each in enumerate(accelerators):
        if (device := choose_device(each.name)).separate:
            streamed, resident = layer_overheads(device, each.launch_overhead)
            found = {"streamed_overhead": streamed, "resident_overhead": resident}
            accelerators[index] = each.model_copy(update=found)
    return machine.model_copy(update={"accelerators": tuple(accelerators)})


def machine_of(*targets: Device) -> Machine:
    """This computer with `targets` for its only accelerators.

    A card's rates are measured where none are kept; a CPU has those that are, and a simulated card those it was given.
    """
    machine = measured_machine() if targets[0].kind == "cuda" else _known_machine()
    by_name = {accelerator.name: accelerator for accelerator in machine.accelerators}
    accelerators = tuple(by_name.get(each.name) or _accelerator(each) for each in targets)
    return machine.model_copy(update={"accelerators": accelerators, "pinnable": targets[0].pinnable()})


def machine_now(*targets: Device) -> Machine:
    """`machine_of(targets)`, of which nothing is taken that is not needed any more: on a CPU garbage goes first."""
    if not targets[0].separate:
        gc.collect()
        trim_heap()
    return machine_of(*targets)


def with_less_taken(machine: Machine, sizes: Mapping[str, int]) -> Machine:
    """`machine` as if so many bytes of what is taken on each of its accelerators, by name, were free.

    A negative size: as if so many more were taken.
    """
    (first, *_), taken = machine.accelerators, machine.ram_used
    accelerators = tuple(_freer(each, sizes.get(each.name, 0)) for each in machine.accelerators)
    if first.is_cpu:
        taken = max((taken or 0) - sizes.get(first.name, 0), 0)
    return machine.model_copy(update={"accelerators": accelerators, "ram_used": taken})


def with_taken(machine: Machine, sizes: Mapping[str, int]) -> Machine:
    """`machine` where tensors of this process take `sizes` bytes of the accelerators that are named there."""
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
    """What is known of a device that is none of this computer's usual ones."""
    taken = target.allocated_bytes() if target.separate else None
    now = {"name": target.name, "allocated": taken, "expandable_refused": target.expandable_refused()}
    return known_accelerator(target).model_copy(update=now)


def _known_machine() -> Machine:
    """This computer, with its rates where they are kept."""
    machine = find_machine()
    return _rated(read_kept().get(machine_key(machine)), machine) or machine


def _rated(fields: object, machine: Machine) -> Machine | None:
    """`machine` with the rates that were kept of it; None where they are none."""
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
    """A plan, and what it was made from; None where its call could not be measured."""

    plan: Plan
    planning_inputs: PlanningInputs | None


def plan_within(
    path: Path, request: Request | None, plan_target: PlanTarget, dtype: str, example: Mapping[str, Any] | None = None
) -> PlannedFolder:
    """The plan for a call of the pipeline in the folder `path` within a site's limits: for `request`, or the `example`.

    On a CPU what this process holds by now is part of the budget: what measuring left behind goes first.
    """
    asked, given = request or Request(), None
    if example is not None:
        kind = getattr(diffusers, check_folder(path).pipeline_class)
        asked, given = asked_by(object.__new__(kind), example), Given(example, plan_target.devices[0].torch_device)
    try:
        measurer = Measurer(path, dtype, expandable=plan_target.expandable)
        with showing("planning", {}):
            planning_inputs = measured(
                measurer, asked, given, plan_target.limits, lambda: machine_now(*plan_target.devices)
            )
    except InputError as error:
        if request is not None or not isinstance(error, RequestError):
            raise
        return _unmeasured(path, asked, plan_target, dtype, error)
    except Exception as error:  # of anybody's code
        return _unmeasured(path, asked, plan_target, dtype, error)
    return PlannedFolder(planning_inputs.plan(plan_target.limits), planning_inputs)


def _unmeasured(path: Path, asked: Request, plan_target: PlanTarget, dtype: str, error: Exception) -> PlannedFolder:
    pipe = build_folder(check_folder(path), getattr(torch, dtype))
    return PlannedFolder(with_reason(plan_unmeasured(pipe, plan_target), asked, error), None)
