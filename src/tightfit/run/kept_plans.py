"""Whether the plan of one call serves another."""

from __future__ import annotations

from tightfit.run.call_arguments import CallShape
from tightfit.schema.plan import Plan

__all__ = ["is_within", "offloads_nothing"]


def offloads_nothing(plan: Plan) -> bool:
    """Whether the plan would gain nothing from more memory."""
    resident = all(part.placement == "resident" for part in plan.components.values())
    return resident and plan.lossless and not plan.vae.splits


def is_within(shape: CallShape, other: CallShape) -> bool:
    """Whether a call of `shape` needs no more memory than one of `other`."""
    if (shape.guided and other.guided is False) or shape.others != other.others:
        return False
    return all(
        less is not None and more is not None and less <= more if less != more else True
        for less, more in zip(shape[:4], other[:4], strict=True)
    )
