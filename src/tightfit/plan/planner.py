"""Footprint + Machine + Budget → the Plan that fits, is lossless, is fastest and takes least, in this order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.plan.calibration import calibrate
from tightfit.plan.component_order import schedule_of
from tightfit.plan.default_rates import with_default_rates
from tightfit.plan.device_maps import check_cards, fixed_locations, with_device_map
from tightfit.plan.device_search import DeviceSearch, Storages, storages_of
from tightfit.plan.forecast import add_forecast, bytes_within, taken_by_others
from tightfit.plan.missing import missing_parts
from tightfit.plan.multi_device import plan_jointly
from tightfit.plan.options import SearchCaches
from tightfit.plan.placement_search import Solution
from tightfit.plan.presets import idle_plan, plan_for
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import GROUP_SPARE, Accelerator, Budget, Machine
from tightfit.schema.plan import Plan, Reason, check_techniques
from tightfit.schema.results import CallMeasurement
from tightfit.schema.stores import default_store, default_store_rates
from tightfit.units import format_bytes, format_enough

__all__ = ["SPARE", "SPARE_LEAST", "find_missing", "make_plan"]

SPARE = 0.05  # fraction of free memory that is left unused without a budget …
SPARE_LEAST = 512 * 2**20  # … and at least this many bytes of a card: kernels and libraries are loaded later


class _MemoryLimits(NamedTuple):
    """Memory that a plan may use."""

    size: int  # bytes of the device
    ram: int | None  # bytes of host memory for weights and feature maps; None: unlimited
    taken: int = 0  # bytes that this process uses already …
    whole: int | None = None  # … out of this many; None: in addition to `size`
    card: bool = True  # False: the device is a CPU, whose bytes are those of the process
    others: int = 0  # bytes of `taken` that other processes of its control group hold, or are left to them

    @property
    def described(self) -> str:
        text = format_bytes(self.size + self.taken if self.whole is None else self.whole)
        if self.taken and self.card:
            text += f", of which other tensors of this process take {format_bytes(self.taken)},"
        elif self.taken:
            text += f", while {self.holders} before anything is loaded,"
        return text

    @property
    def holders(self) -> str:
        text = f"this process holds {format_bytes(self.taken - self.others)}"
        return text + f" and {format_bytes(self.others)} are for others in its control group" * bool(self.others)


def make_plan(
    footprint: Footprint,
    machine: Machine,
    budget: Budget | None = None,
    allow: Sequence[str] = (),
    *,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    measurements: Sequence[CallMeasurement] = (),
    cache: SearchCaches | None = None,
) -> Plan:
    """Return the best plan for `footprint`'s call, within `budget` on `device` of `machine` (None: its first).

    A budget for several devices applies to all of them together; `device` is then the one on which denoisers compute
    (None: the best), and `measurements`, which are of one device, are ignored.

    Without a budget: within 95 % of what was free, and on a card at least 512 MiB less. On a CPU, device bytes and RAM
    are the same, and what this process uses already counts; on a card, other tensors of this process do.
    `device_map` fixes where components compute, or where their weights are; None: nothing.
    The plan is lossless if any such plan fits; else it uses lossy techniques of `allow`. `measurements` are those
    of calls like this one on this machine, which correct what shapes and rates give. `cache` is shared with
    other plans of the same call on the same device (None: no cache).
    Raises PlanError for a footprint without a request, unknown devices and techniques, and BudgetTooSmall if nothing
    fits.
    """
    allowed = check_techniques(allow)
    if not footprint.phases:
        raise PlanError(f"this footprint of {footprint.pipeline} tells of no call: measure it with a request")
    if budget is not None and budget.devices:
        return plan_jointly(footprint, machine, budget, allowed, device, device_map)
    known = _accelerator(machine, device)
    check_cards(device_map, [known.name])
    accelerator, store_rates = with_default_rates(known), default_store_rates(machine, known)
    limits, fixed = _memory_limits(accelerator, machine, budget), fixed_locations(device_map, footprint, accelerator)

    def search_with(storages: Storages) -> DeviceSearch:
        calibrated = calibrate(footprint, measurements, storages).footprint
        caches = cache.caches_for(calibrated) if cache is not None and not storages else None
        return DeviceSearch(calibrated, accelerator, store_rates, storages, caches, fixed)

    for storages in storages_of(footprint, allowed):
        search = search_with(storages)
        found = search.best(limits.size, limits.ram)
        if found is not None:
            reasons = list(found.variant_search.reasons(found, limits.size))
            reasons += _limit_reasons(known, accelerator, limits, budget)
            reasons += calibrate(footprint, measurements, storages).reasons
            return _plan(search, machine, budget, limits.size, found, reasons, device_map)
    others = [name for name in ("fp8", "int8") if name not in allowed]
    lossy = {name: [search_with(stored) for stored in storages_of(footprint, [name]) if stored] for name in others}
    raise _too_small(search_with({}), lossy, machine, limits, device_map)


def find_missing(
    footprint: Footprint,
    machine: Machine,
    budget: Budget | None = None,
    *,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    measurements: Sequence[CallMeasurement] = (),
    cache: SearchCaches | None = None,
) -> tuple[str, ...]:
    """Return the unmeasured parts of `footprint` that could improve a plan, in the order in which to measure them.

    For several devices that is not known: then all unmeasured parts. Raises PlanError as `make_plan` does.
    """
    if not footprint.not_measured or (budget is not None and budget.devices):
        return footprint.not_measured
    known = _accelerator(machine, device)
    accelerator, store_rates = with_default_rates(known), default_store_rates(machine, known)
    limits, cache = _memory_limits(accelerator, machine, budget), cache or SearchCaches()
    fixed = fixed_locations(device_map, footprint, accelerator)

    def search(calibrated: Footprint) -> DeviceSearch:
        return DeviceSearch(calibrated, accelerator, store_rates, {}, cache.caches_for(calibrated), fixed)

    return missing_parts(calibrate(footprint, measurements, {}).footprint, search, limits.size, limits.ram)


def _memory_limits(device: Accelerator, machine: Machine, budget: Budget | None) -> _MemoryLimits:
    if device.is_cpu:
        taken = machine.ram_used or 0
        if budget is None:
            free = device.bytes if device.free is None else device.free
            spare = max(free * SPARE, GROUP_SPARE if machine.ram_limit else 0)
            return _MemoryLimits(max(int(free - spare), 0), None, taken, card=False)
        whole = min(budget.of_cpu, device.bytes)
        others = 0
        if machine.ram_limit and device.free is not None:
            others = max(whole - taken - max(device.free - GROUP_SPARE, 0), 0)
        return _MemoryLimits(max(whole - taken - others, 0), None, taken + others, whole, card=False, others=others)
    free = bytes_within(device, device.bytes) if device.free is None else device.free
    if budget is None:
        return _MemoryLimits(max(free - _reserved_bytes(device, free), 0), None)
    if budget.device is None:
        return _MemoryLimits(free, budget.ram)
    whole = min(budget.device, device.bytes)
    return _MemoryLimits(bytes_within(device, whole), budget.ram, taken_by_others(device), whole)


def _reserved_bytes(device: Accelerator, free: int) -> int:
    """Return the bytes of `free` that are left unused without a budget.

    Kernels and libraries are loaded when they are first used, into memory outside of torch's allocator. If the free
    bytes of a card are not known, that memory is part of the bytes assumed for the context.
    """
    least = SPARE_LEAST if device.kind == "cuda" and device.free is not None else 0
    return max(math.ceil(free * SPARE), least)


def _limit_reasons(
    known: Accelerator, rated: Accelerator, limits: _MemoryLimits, budget: Budget | None
) -> Iterator[Reason]:
    if budget is None:
        because = f"that is {1 - SPARE:.0%} of what was free on {known.display_name}"
        if not known.is_cpu and known.free is not None and _reserved_bytes(known, known.free) == SPARE_LEAST:
            because = f"that leaves {format_bytes(SPARE_LEAST)} of what was free on {known.display_name}"
        yield Reason(decision=f"{limits.described} may be used", because=because)
    elif limits.taken:
        by_tensors = f"other tensors of this process take {format_bytes(limits.taken)}"
        because = f"{by_tensors if limits.card else limits.holders} already"
        yield Reason(decision=f"{format_bytes(limits.size)} are left for the pipeline", because=because)
    if known.expandable_refused is not None:
        yield Reason(decision="the allocator's segments are fixed", because=known.expandable_refused)
    if rated != known:
        because = f"not all rates of {known.display_name} were measured (run `tightfit machine`); bytes need none"
        yield Reason(decision="times are guesses", because=because)


def _too_small(
    search: DeviceSearch,
    lossy: Mapping[str, Sequence[DeviceSearch]],
    machine: Machine,
    limits: _MemoryLimits,
    device_map: DeviceMap | None,
) -> BudgetTooSmall:
    """Return an error with what would fit: more of the device, more RAM, or a `lossy` technique not allowed so far."""
    footprint, device, (size, ram, taken, *_) = search.footprint, search.device, limits
    needed = search.min_bytes(ram)
    phase = _tightest_phase(search, machine, needed, ram)
    request = footprint.request.described if footprint.request else "this call"
    text = f"{footprint.pipeline} cannot do {request} within {limits.described} on {device.display_name}"
    text += f" and {format_bytes(ram)} of RAM" if ram is not None else ""
    text += f", with {device_map.described}" if device_map and device_map.components else ""
    would = [f"{format_enough(needed + taken)} would do, for {phase}"]
    min_ram = search.min_ram(size) if ram is not None else None
    would += [f"{format_enough(min_ram)} of RAM would do"] if min_ram is not None else []
    smaller = [name for name, searches in lossy.items() if any(each.min_bytes(ram) <= size for each in searches)]
    would += [f"allow={' or '.join(smaller)} would do"] if smaller else []
    would += ["something smaller may do"]
    facts = {"phase": phase, "frames": footprint.request and footprint.request.frames}
    return BudgetTooSmall(f"{text}: {'; '.join(would)}", needed_bytes=needed + taken, needed_ram=min_ram, **facts)


def _tightest_phase(search: DeviceSearch, machine: Machine, needed: int, ram: int | None) -> str | None:
    """Return the phase that needs all of `needed` bytes; a plan is made only if the search leaves several."""
    phases = search.tightest_phases(needed, ram)
    if len(phases) == 1:
        return phases.pop()
    found = search.best(needed, ram)
    forecast = _plan(search, machine, None, needed, found).forecast if found else ()
    return max(forecast, key=lambda phase: phase.peak_bytes).name if forecast else None


def _accelerator(machine: Machine, device: str | None) -> Accelerator:
    for accelerator in machine.accelerators:
        if device in (None, accelerator.name):
            return accelerator
    names = ", ".join(accelerator.name for accelerator in machine.accelerators)
    raise PlanError(f"no device {device} in this machine: there is {names}", device=device)


def _grows(device: Accelerator, found: Solution, size: int) -> bool:
    if device.is_cpu:
        return size - found.peak < found.variant_search.max_allocator_bytes(found.vae)
    return device.expandable_refused is None


def _plan(
    search: DeviceSearch,
    machine: Machine,
    budget: Budget | None,
    size: int,
    found: Solution,
    reasons: Sequence[Reason] = (),
    device_map: DeviceMap | None = None,
) -> Plan:
    """Return the solution found for `size` bytes as a plan; `reasons` says why weights are where they are.

    On a CPU, pages are allocated again for every large tensor, which costs time, unless as many bytes are left over as
    its heap may hold unused.
    """
    footprint, device = found.variant_search.footprint, search.device
    store = default_store(spare_ram=device.is_cpu or bool(budget and budget.ram))
    stores = device_map.stores if device_map else {}
    components = {c.name: idle_plan(c, stores.get(c.name, store)) for c in footprint.components}
    components |= {name: option.plan for name, option in found.options}
    for name, cache in footprint.caches.items():
        components[name] = components[name].model_copy(update={"cache": cache})
    choices = {
        "components": {name: part.to_mapping() for name, part in components.items()},
        "vae": found.vae.to_mapping(),
        "budget": budget.to_mapping() if budget else None,
        "schedule": [run.to_mapping() for run in schedule_of(search.footprint)],
        "expandable_segments": _grows(device, found, size),
    }
    plan = plan_for(
        footprint, device.name, separate=not device.is_cpu, choices=choices, request=footprint.request,
        pinnable=machine.pinnable or 0, accelerator=device, placed=reasons,
    )  # fmt: skip
    return with_device_map(add_forecast(footprint, plan, device, search.store_rates), device_map)
