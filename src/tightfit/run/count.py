"""A footprint and a plan → a Prediction, computed as by the planner instead of simulated.

For plans within limits, since a simulation needs torch and can take longer than planning; and for plans that load
weights from disk, which a simulated card does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.catalog.cuda import CONTEXT
from tightfit.plan.default_rates import computer_with, with_default_rates
from tightfit.plan.forecast import PhaseEstimate, simulate_jointly
from tightfit.plan.options import variant_of
from tightfit.plan.presets import plan_for
from tightfit.schema.footprint import Component, Footprint
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.results import PhaseTrace, Prediction, Trace
from tightfit.schema.stores import StoreRates, default_store_rates

__all__ = ["PLANNED_NOTE", "capacity_of", "counted", "main_dtype", "needs_store_rates"]

NOTE = "weights are read from the disk: this is computed from the footprint, not simulated, and without bytes moved"
PLANNED_NOTE = (
    "peaks are upper bounds, computed without simulating the call; --timeline FILE simulates it, and counts the bytes "
    "copied to the card"
)


def needs_store_rates(choices: dict[str, Any]) -> bool:
    """Whether any component is loaded from a store with a rate of its own under `choices` of Plan fields."""
    parts = Plan.from_mapping(choices).components.values()
    return any(part.moves(separate=False) for part in parts)


def counted(
    footprint: Footprint, accelerator: Accelerator, choices: dict[str, Any], *, title: str, card: str | None,
    others: Sequence[Accelerator] = (), machine: Machine | None = None, note: str = NOTE,
) -> Prediction:  # fmt: skip
    """Predict the call of `footprint` on `accelerator` under `choices` of Plan fields.

    With `others`, each component runs on the device that the choices name. On a CPU, the capacity is reduced by the
    RAM that this process already holds, as in `machine`.
    """
    host = machine or computer_with(accelerator)
    shares = not accelerator.is_cpu
    default = choices["device"] if others and "device" in choices else "cuda:0" if shares else "cpu"
    plan = plan_for(
        footprint, default, separate=shares, choices=choices, request=footprint.request,
        pinnable=host.pinnable or 0, accelerator=accelerator,
    )  # fmt: skip
    devices = (
        {each.name: with_default_rates(each) for each in (accelerator, *others)}
        if others
        else {default: with_default_rates(accelerator)}
    )
    planned_seconds = {phase.name: phase.seconds for phase in plan.forecast}
    phases, now = list[PhaseTrace](), 0.0
    rates = default_store_rates(host, accelerator)
    simulated = simulate_jointly(footprint, plan, devices, rates)
    for phase, estimates in zip(footprint.with_variant(variant_of(footprint, plan)).phases, simulated, strict=True):
        own = estimates[plan.device]
        peaks = {name: each.weights + each.allocator_bytes for name, each in estimates.items()}
        seconds = planned_seconds.get(phase.name, sum(each.seconds for each in estimates.values()))
        phases.append(
            PhaseTrace(
                name=phase.name, start=now, seconds=seconds, peak_bytes=peaks.pop(plan.device),
                peak_weights=own.weights, peak_reserved=own.peak(devices[plan.device]), runs=len(phase.call_order),
                other_devices=peaks,
            )
        )  # fmt: skip
        now += seconds
    name = card or accelerator.product_name or accelerator.name
    capacities = {each: capacity_of(plan, known, host.ram_used or 0) for each, known in devices.items()}
    elsewhere = {each: capacities[each] for each in plan.devices if each != plan.device}
    fits = [estimates[each].peak(devices[each]) <= capacities[each] for estimates in simulated for each in plan.devices]
    return Prediction(
        model=title,
        card=name,
        capacity=capacities[plan.device],
        other_devices=elsewhere,
        needed_bytes=max(phase.peak_reserved for phase in phases),
        fits=all(fits),
        plan=plan,
        trace=Trace(
            device=name, seconds=now, phases=tuple(phases), caches=footprint.kept, lossy=plan.lossy, notes=(note,)
        ),
        host_seconds=_host_seconds(footprint, plan, devices, rates, simulated),
        dtype=main_dtype(footprint.components),
        steps=footprint.steps,
    )


def _host_seconds(
    footprint: Footprint,
    plan: Plan,
    devices: Mapping[str, Accelerator],
    rates: StoreRates,
    simulated: Sequence[Mapping[str, PhaseEstimate]],
) -> dict[str, float]:
    """How many seconds of each phase the host works: what a host that is a little slower adds, extrapolated."""
    slower = {
        name: each.model_copy(update={field: getattr(each, field) * (1 + _SLOWER) for field in _HOST})
        for name, each in devices.items()
    }
    found: defaultdict[str, float] = defaultdict(float)
    for own, later in zip(simulated, simulate_jointly(footprint, plan, slower, rates), strict=True):
        for name, estimate in own.items():
            found[estimate.name] += max(later[name].seconds - estimate.seconds, 0.0) / _SLOWER
    return dict(found)


_SLOWER = 0.01
_HOST = "launch_overhead", "module_overhead", "resident_overhead", "streamed_overhead"


def main_dtype(components: Sequence[Component]) -> str | None:
    """Return the dtype of most weights of the largest component, as loaded; None without components."""
    return max(components, key=lambda each: each.bytes).main_dtype if components else None


def capacity_of(plan: Plan, accelerator: Accelerator, taken: int = 0) -> int:
    """Return the bytes available for tensors; on a CPU, `taken` bytes of its memory are in use already."""
    budget = plan.budget
    if accelerator.is_cpu:
        most = min(budget.of_cpu, accelerator.bytes) if budget else accelerator.bytes
        return max(most - taken, 1)
    budgeted = (budget.of(accelerator.name) if budget else None) or accelerator.bytes
    return max(min(budgeted, accelerator.bytes - CONTEXT), 1)
