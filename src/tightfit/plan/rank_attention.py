"""Which kind of attention ranks use, by predicted time, and the reasons that a plan gives for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightfit.errors import BudgetTooSmall
from tightfit.schema.footprint import ComponentCall, Footprint
from tightfit.schema.machine import EXCHANGES, KernelGroup
from tightfit.schema.plan import ContextAttention, Plan, Reason
from tightfit.units import format_bytes, format_seconds

__all__ = [
    "alone_reason",
    "attention_reason",
    "exchange_reason",
    "exchanged_bytes",
    "exchanges_of",
    "shared_weights_reason",
]

NAMES: Mapping[ContextAttention, str] = {"gathered": "gathered keys", "ring": "a ring", "heads": "heads"}


def attention_reason(way: ContextAttention, seconds: Mapping[ContextAttention, float]) -> Reason:
    """Return the reason for `way`, the fastest of those that fit, by their predicted `seconds`."""
    others = [f"{NAMES[each]} {format_seconds(its)}" for each, its in seconds.items() if each != way]
    because = f"predicted are {format_seconds(seconds[way])}; with " + " and ".join(others)
    alone = "with no other kind does the call fit on all ranks"
    return Reason(decision=f"attention of ranks by {NAMES[way]}", because=because if others else alone)


def alone_reason(refusal: BudgetTooSmall) -> Reason:
    """Return why every rank runs autoencoders whole: with their rows shared there was this `refusal`."""
    return Reason(decision="autoencoders run on every rank", because=f"with their rows shared, {refusal}")


def shared_weights_reason(plan: Plan, ranks: int) -> Reason | None:
    """Return why a rank counts a part of its weights in host memory, of which `ranks` share one copy; None: no part."""
    names = [name for name, each in plan.components.items() if each.store.is_host_memory]
    names = [name for name in names if plan.components[name].placement != "resident"]
    if ranks == 1 or not names:
        return None
    because = f"{ranks} ranks of this computer can map the same memory; each counts 1/{ranks} of it as its RAM"
    return Reason(decision=f"one copy in host memory of {', '.join(names)}", because=because)


def exchange_reason(footprint: Footprint, per_node: int | None = None) -> Reason:
    """Return what a rank sends to the others in a call; `per_node` ranks are on a computer (None: all)."""
    count = sum(group.kernels * call.runs for call in _calls(footprint) for group in exchanges_of(call))
    because = f"a call exchanges them with other ranks in {count:,} exchanges, counted in its predicted time"
    return Reason(decision=f"{format_bytes(exchanged_bytes(footprint, per_node))} are sent", because=because)


def exchanged_bytes(footprint: Footprint, per_node: int | None = None) -> int:
    """Return the bytes that a rank sends to others in a call; `per_node` ranks are on a computer (None: all)."""
    cards = {"network": per_node or 1}  # a link's traffic is that of all cards of a computer
    groups = ((group, call.runs) for call in _calls(footprint) for group in exchanges_of(call))
    return sum(group.traffic // cards.get(group.kind, 1) * runs for group, runs in groups)


def exchanges_of(call: ComponentCall) -> list[KernelGroup]:
    """Return the exchanges of one of a footprint's component calls."""
    return [group for use in call.block_uses for group in use.work if group.kind in EXCHANGES]


def _calls(footprint: Footprint) -> Iterator[ComponentCall]:
    return (call for phase in footprint.phases for call in phase.calls)
