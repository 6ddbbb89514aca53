"""A footprint under a plan, on a machine's devices → predicted seconds and bytes of each phase."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tightfit.catalog.cuda import KEEPS_WORKSPACE, PAGE_TAIL, product_workspaces, workspace_bytes
from tightfit.plan.component_cost import SEGMENT, ComponentCost, round_up
from tightfit.plan.component_order import CoResidencyTracker, method_of, prefetch_reasons
from tightfit.plan.compute_segments import seconds_without_weights, segment_of
from tightfit.plan.cost_model import CostModel
from tightfit.plan.options import variant_of
from tightfit.plan.overlap import OverlappedParts, overlapped_parts
from tightfit.plan.split_footprint import with_parts
from tightfit.schema.footprint import ComponentCall, Footprint, Phase, Variant
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import PhaseForecast, Plan
from tightfit.schema.stores import NO_RATES, StoreRates

__all__ = [
    "PhaseEstimate",
    "add_forecast",
    "add_joint_forecast",
    "bytes_within",
    "most_weights",
    "needed_bytes",
    "share_of",
    "simulate",
    "simulate_jointly",
    "taken_by_others",
]


PERCENT, MARGIN = 1, 32 * 2**20  # percent and bytes by which a peak may exceed the sum of its parts, …
MARGIN_CPU = 128 * 2**20  # … and bytes on a CPU, where libraries load code and keep buffers in the same memory
PAGED = ("cuda", "simulated")  # kinds of devices that have CUDA's allocator, or simulate it


class PhaseEstimate(NamedTuple):
    """Predicted time and memory of a phase, before the margin is added."""

    name: str
    seconds: float
    weights: int  # peak bytes of weights on the device
    allocator_bytes: int  # bytes that an allocator needs for activations and widened weights
    by_component: Mapping[str, float] = MappingProxyType({})  # seconds of the work of each

    def peak(self, device: Accelerator) -> int:
        """Return the bytes reserved on `device` for both, margin included."""
        return needed_bytes(self.weights, self.allocator_bytes, device)


def add_forecast(footprint: Footprint, plan: Plan, device: Accelerator, store_rates: StoreRates = NO_RATES) -> Plan:
    """Return `plan` with the forecast of its first call on `device`, and the bytes of each component to prefetch."""
    call = _CallSimulation(footprint.with_variant(variant_of(footprint, plan)), plan, device, store_rates)
    forecast = tuple(PhaseForecast(name=t.name, seconds=t.seconds, peak_bytes=t.peak(device)) for t in call.estimates)
    return _with_forecast(plan, forecast, call.prefetch_bytes)


def simulate(
    footprint: Footprint, plan: Plan, device: Accelerator, store_rates: StoreRates = NO_RATES
) -> tuple[PhaseEstimate, ...]:
    """Return the estimate of each phase, before the margin is added."""
    return _CallSimulation(footprint.with_variant(variant_of(footprint, plan)), plan, device, store_rates).estimates


def add_joint_forecast(
    footprint: Footprint, plan: Plan, devices: Mapping[str, Accelerator], store_rates: StoreRates = NO_RATES
) -> Plan:
    """Return `plan` as `add_forecast` does, for components that compute on several `devices`, by name."""
    calls, overlapped = _calls(footprint, plan, devices, store_rates), overlapped_parts(footprint, plan, devices)
    forecast = tuple(_joint_forecast(plan.device, phases, devices, overlapped) for phases in _by_phases(calls))
    prefetch_bytes = {run: size for call in calls.values() for run, size in call.prefetch_bytes.items()}
    return _with_forecast(plan, forecast, prefetch_bytes)


def simulate_jointly(
    footprint: Footprint, plan: Plan, devices: Mapping[str, Accelerator], store_rates: StoreRates = NO_RATES
) -> list[dict[str, PhaseEstimate]]:
    """Return for each phase the estimates of a plan's devices, by name, before the margin is added."""
    return _by_phases(_calls(footprint, plan, devices, store_rates))


def _calls(
    footprint: Footprint, plan: Plan, devices: Mapping[str, Accelerator], store_rates: StoreRates
) -> dict[str, _CallSimulation]:
    footprint, plan = with_parts(footprint.with_variant(variant_of(footprint, plan)), plan)
    names = {name: {c.name for c in footprint.components if plan.device_of(c.name) == name} for name in plan.devices}
    shares = {name: share_of(footprint, names[name], hosts=name == plan.device) for name in names}
    return {name: _CallSimulation(share, plan, devices[name], store_rates) for name, share in shares.items()}


def _by_phases(calls: Mapping[str, _CallSimulation]) -> list[dict[str, PhaseEstimate]]:
    phases = zip(*(call.estimates for call in calls.values()), strict=True)
    return [dict(zip(calls, estimates, strict=True)) for estimates in phases]


def _with_forecast(
    plan: Plan, forecast: tuple[PhaseForecast, ...], prefetch_bytes: Mapping[tuple[str, str], int]
) -> Plan:
    limited = (
        run.model_copy(update={"prefetch": prefetch_bytes.get((run.component, run.method))}) for run in plan.schedule
    )
    order = tuple(limited)
    reasons = (*plan.reasons, *prefetch_reasons(order, plan.components))
    return plan.model_copy(update={"forecast": forecast, "schedule": order, "reasons": reasons})


def _joint_forecast(
    host: str,
    estimates: Mapping[str, PhaseEstimate],
    devices: Mapping[str, Accelerator],
    overlapped: Collection[OverlappedParts],
) -> PhaseForecast:
    peaks = {
        name: each.peak(devices[name])
        for name, each in estimates.items()
        if name == host or each.weights or each.allocator_bytes
    }
    work = {name: seconds for each in estimates.values() for name, seconds in each.by_component.items()}
    saved = sum(parts.seconds_saved(work) for parts in overlapped)
    seconds = sum(each.seconds for each in estimates.values()) - saved
    return PhaseForecast(name=estimates[host].name, seconds=seconds, peak_bytes=peaks.pop(host), other_devices=peaks)


def needed_bytes(weights: int, activation_bytes: int, device: Accelerator) -> int:
    """Return the bytes reserved on `device` for `weights` and `activation_bytes`, with workspace and margin."""
    whole = weights + activation_bytes + _workspace(device)
    return round_up(whole + max(whole * PERCENT // 100, _page_tail(device)) + _margin(device))


def most_weights(size: int, activation_bytes: int, device: Accelerator) -> int:
    """Return the most bytes of weights that fit beside `activation_bytes` in `size`, by `needed_bytes`."""
    left = size // SEGMENT * SEGMENT - _margin(device)
    whole = min(left - _page_tail(device), ((left + 1) * 100 - 1) // (100 + PERCENT))
    return whole - activation_bytes - _workspace(device)


def taken_by_others(device: Accelerator) -> int:
    """Return the bytes of a card that other tensors of this process take.

    Little more than cuBLAS's workspace counts as 0: it remains after a first call, and is part of what a plan needs.
    """
    taken = device.allocated or 0
    return taken if taken > _workspace(device) + SEGMENT else 0


def bytes_within(device: Accelerator, size: int) -> int:
    """Return the bytes for a pipeline if all tensors of this process may take `size` bytes of a card together."""
    return max(min(size, device.bytes) - taken_by_others(device), 0)


def _margin(device: Accelerator) -> int:
    return MARGIN_CPU if device.is_cpu else MARGIN


def _page_tail(device: Accelerator) -> int:
    """Return the bytes of the last page of CUDA's allocator that may be unused; above 1.8 GB, a percent is more."""
    return PAGE_TAIL if device.kind in PAGED else 0


def _workspace(device: Accelerator) -> int:
    """Return the bytes of cuBLAS's workspace that a phase's activations do not include.

    If torch allocates one for each product (2.15 and newer), activations include it: then only its excess over the
    workspace of a card without a compute capability, on which footprints are measured.
    """
    if device.is_cpu:
        return 0
    if KEEPS_WORKSPACE:
        return sum(product_workspaces(device.compute_capability, through_lt=True))
    return workspace_bytes(device.compute_capability) - workspace_bytes(None)


class _CallSimulation:
    """Simulation of one pipeline call on one device.

    If prefetching the next component would have to wait for the link, it is not prefetched: else a copy that the
    pipeline makes between the two would have to wait, too, while nothing computes.
    """

    def __init__(self, footprint: Footprint, plan: Plan, device: Accelerator, store_rates: StoreRates) -> None:
        self._device, self._vae = device, plan.vae
        self._costs = {
            c.name: ComponentCost(c, plan.components[c.name], device, CostModel(c, device), store_rates)
            for c in footprint.components
        }
        self._tracker = CoResidencyTracker()
        self._now = 0.0
        self._last: ComponentCost | None = None  # the component that ran last
        self.prefetch_bytes: dict[tuple[str, str], int] = {}  # bytes prefetched while the component before finishes
        self.estimates = tuple(self._phase(phase) for phase in footprint.phases)

    def _phase(self, phase: Phase) -> PhaseEstimate:
        began, weights = self._now, 0 if phase.call_order else self._streamed_bytes
        seconds: defaultdict[str, float] = defaultdict(float)
        strip_profile, widened = self._vae.strip_profile(phase), 0
        order = [(phase.calls[index], len(list(group))) for index, group in itertools.groupby(phase.call_order)]
        for (call, runs), following in itertools.zip_longest(order, (each for each, _ in order[1:])):
            cost = self._costs[call.component]
            if self._tracker.record_run(call.component) and not cost.is_resident:
                self._record_prefetch(call, cost)
                self._now = cost.begin_load(self._now)
            weights, widened = max(weights, self._streamed_bytes), max(widened, cost.widened)
            begun = self._now
            self._now = cost.work(call, runs, self._now, strip_profile, following)
            seconds[call.component] += self._now - begun
            self._last = cost
        self._now += phase.time_scale * seconds_without_weights([segment_of(phase.other_work, self._device)])
        weights += sum(cost.always for cost in self._costs.values())
        allocator_bytes = (strip_profile or phase).allocator_bytes + widened
        return PhaseEstimate(phase.name, self._now - began, weights, allocator_bytes, seconds)

    def _record_prefetch(self, call: ComponentCall, cost: ComponentCost) -> None:
        if self._last is None or self._last.is_resident or math.isinf(cost.rate):
            return
        size, key = cost.prefetchable_bytes(self._last.idle), method_of(call)
        self.prefetch_bytes[key] = min(size, self.prefetch_bytes.get(key, size))

    @property
    def _streamed_bytes(self) -> int:
        """Bytes of weights on the device that are not always resident."""
        return sum(self._costs[name].streamed_bytes for name in self._tracker.on_device)


def share_of(footprint: Footprint, names: Collection[str], *, hosts: bool) -> Footprint:
    """Return the footprint of the device on which the components `names` compute, with the same phases.

    With `hosts` it is the pipeline's own device: it holds the inputs and outputs of all components, and work between
    components runs there. Another device holds what its components need while they run: those bytes were measured with
    all live activations on one device, so they are rather too many.
    """
    following = itertools.chain(footprint.phases[1:], [None])
    phases = [
        _phase_on_device(phase, after, names, hosts) for phase, after in zip(footprint.phases, following, strict=True)
    ]
    variants = tuple(_variant_on_device(variant, names) for variant in footprint.variants) if hosts else ()
    components = tuple(component for component in footprint.components if component.name in names)
    return footprint.model_copy(update={"components": components, "phases": tuple(phases), "variants": variants})


def _variant_on_device(variant: Variant, names: Collection[str]) -> Variant:
    seen = tuple(_phase_on_device(phase, None, names, hosts=True) for phase in variant.phases)
    return variant.model_copy(update={"phases": seen})


def _phase_on_device(phase: Phase, after: Phase | None, names: Collection[str], hosts: bool) -> Phase:
    kept = [index for index, call in enumerate(phase.calls) if call.component in names]
    if len(kept) == len(phase.calls) and hosts:
        return phase
    if kept:
        order = tuple(kept.index(index) for index in phase.call_order if index in kept)
        passes = tuple(phase.calls[index] for index in kept)
        update: dict[str, object] = {"calls": passes, "call_order": order, "other_work": phase.other_work * hosts}
        if any(call.is_part for call in passes):
            peak = max([phase.peak_between_calls * hosts, *(call.peak for call in passes)])
            update |= {"peak": peak, "allocator_bytes": peak + phase.allocator_bytes - phase.peak}
        return phase.model_copy(update=update)
    live_bytes = (
        max(
            [
                phase.peak_between_calls,
                *map(_live_bytes_at_start, phase.calls),
                *map(_live_bytes_at_start, after.calls if after else ()),
            ]
        )
        * hosts
    )
    nothing: dict[str, object] = dict.fromkeys(
        ("calls", "call_order", "unused_blocks", "conditional_blocks", "strip_options"), ()
    )
    own = {
        "peak": live_bytes,
        "peak_between_calls": live_bytes,
        "allocator_bytes": live_bytes,
        "other_work": phase.other_work if hosts else (),
    }
    return phase.model_copy(update=nothing | own)


def _live_bytes_at_start(call: ComponentCall) -> int:
    """Return the bytes of activations on the device when a call begins."""
    return call.block_uses[0].live_bytes_at_start if call.block_uses else 0
