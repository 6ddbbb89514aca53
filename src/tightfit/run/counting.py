"""A footprint and a plan under which weights come from the disk → a Prediction, counted and not rehearsed.

A pretend card has no disk. What a plan says of it is arithmetic on a footprint, as for the planner.
"""

from __future__ import annotations

from typing import Any

from tightfit.catalog.cuda import CONTEXT
from tightfit.plan.forecast import play
from tightfit.plan.guesses import computer_with, rated, rated_disk
from tightfit.plan.levels import plan_for
from tightfit.plan.options import variant_of
from tightfit.records import Accelerator, Footprint, Machine, PhaseTrace, Plan, Prediction, Trace

__all__ = ["capacity_of", "counted", "reads_disk"]

NOTE = (
    "weights come from the disk: this is counted from what the model does, not rehearsed; what is brought is not told"
)


def reads_disk(choices: dict[str, Any]) -> bool:
    """Whether anything is brought from the disk under `choices` of Plan fields."""
    parts = Plan.from_mapping(choices).components.values()
    return any(part.home == "disk" and part.placement != "resident" for part in parts)


def counted(
    footprint: Footprint, accelerator: Accelerator, choices: dict[str, Any], *, title: str, card: str | None,
    machine: Machine | None = None,
) -> Prediction:  # fmt: skip
    """What the call that `footprint` tells of takes on `accelerator`, under `choices` of Plan fields.

    Of a CPU's memory, what this process holds by now is taken already: `machine` knows.
    """
    host = machine or computer_with(accelerator)
    shares = not accelerator.is_cpu
    plan = plan_for(
        footprint, "cuda:0" if shares else "cpu", separate=shares, choices=choices, request=footprint.request,
        pinnable=host.pinnable or 0, accelerator=accelerator,
    )  # fmt: skip
    device, working = rated(accelerator), footprint.varied(variant_of(footprint, plan))
    said = {phase.name: phase.seconds for phase in plan.forecast}
    phases, now = list[PhaseTrace](), 0.0
    for phase, told in zip(working.phases, play(working, plan, device, rated_disk(host, accelerator)), strict=True):
        seconds = said.get(told.name, told.seconds)
        phases.append(
            PhaseTrace(
                name=told.name, start=now, seconds=seconds, peak_bytes=told.weights + told.room,
                peak_weights=told.weights, peak_reserved=told.peak(device), runs=len(phase.order),
            )
        )  # fmt: skip
        now += seconds
    name, capacity = card or accelerator.title or accelerator.name, capacity_of(plan, accelerator, host.ram_taken or 0)
    return Prediction(
        model=title,
        card=name,
        capacity=capacity,
        fits=max(phase.peak_reserved for phase in phases) <= capacity,
        plan=plan,
        trace=Trace(device=name, seconds=now, phases=tuple(phases), lossy=plan.lossy, notes=(NOTE,)),
    )


def capacity_of(plan: Plan, accelerator: Accelerator, taken: int = 0) -> int:
    """Bytes that there are for tensors; of a CPU's memory, `taken` are in use already."""
    budget = plan.budget
    if accelerator.is_cpu:
        most = min(budget.of_cpu, accelerator.bytes) if budget else accelerator.bytes
        return max(most - taken, 1)
    asked = budget.device if budget and budget.device else accelerator.bytes
    return max(min(asked, accelerator.bytes - CONTEXT), 1)
