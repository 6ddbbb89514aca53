"""A footprint → in which order components work, and what a plan makes of knowing it before the first call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from tightfit.records import ComponentPlan, Footprint, Reason, Stint

__all__ = ["coming_early", "order_of"]

_METHODS = ("forward", "encode", "decode")  # of whole components; a part that is called by itself counts as forward


def order_of(footprint: Footprint) -> tuple[Stint, ...]:
    """In which order components work, each time from its inputs to its outputs."""
    passes = (phase.passes[index] for phase in footprint.phases for index in phase.order)
    named = ((done.component, done.method if done.method in _METHODS else "forward") for done in passes)
    return tuple(
        Stint(component=component, method=method, runs=len(list(group)))
        for (component, method), group in itertools.groupby(named)
    )


def coming_early(order: Sequence[Stint], components: Mapping[str, ComponentPlan]) -> Iterator[Reason]:
    """Who comes while the one before on the same device ends, and why that is possible."""
    last: dict[str | None, str] = {}
    pairs: dict[str, str] = {}
    for stint in order:
        name = stint.component
        before = last.get(components[name].device)
        if before not in (None, name) and "resident" not in {components[n].placement for n in (name, before)}:
            pairs.setdefault(name, f"{name} after {before}")
        last[components[name].device] = name
    if pairs:
        said = ", ".join(pairs.values())
        because = "what ends gives up its memory layer by layer, and the order of the call is known"
        yield Reason(decision=f"who is next starts to come in the last pass of the one before: {said}", because=because)
