"""A call that several devices do together → what each of them sees of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from tightfit.footprint import ComponentCall, Footprint, Phase, Variant

__all__ = ["share_of"]


def share_of(footprint: Footprint, names: Collection[str], *, hosts: bool) -> Footprint:
    """What a device sees of the call on which the components `names` compute, in the same phases.

    With `hosts` it is the pipeline's own: what components are given waits there, what they return comes there, and what
    is done between them is done there. Another holds what its components need while they work: that room was measured
    with all that waits on the same device, so it is rather too much.
    """
    following = itertools.chain(footprint.phases[1:], [None])
    phases = [_seen(phase, after, names, hosts) for phase, after in zip(footprint.phases, following, strict=True)]
    variants = tuple(_seen_variant(variant, names) for variant in footprint.variants) if hosts else ()
    components = tuple(component for component in footprint.components if component.name in names)
    return footprint.model_copy(update={"components": components, "phases": tuple(phases), "variants": variants})


def _seen_variant(variant: Variant, names: Collection[str]) -> Variant:
    seen = tuple(_seen(phase, None, names, hosts=True) for phase in variant.phases)
    return variant.model_copy(update={"phases": seen})


def _seen(phase: Phase, after: Phase | None, names: Collection[str], hosts: bool) -> Phase:
    kept = [index for index, done in enumerate(phase.calls) if done.component in names]
    if len(kept) == len(phase.calls) and hosts:
        return phase
    if kept:
        order = tuple(kept.index(index) for index in phase.call_order if index in kept)
        passes = tuple(phase.calls[index] for index in kept)
        between = phase.other_work if hosts else ()
        return phase.model_copy(update={"calls": passes, "call_order": order, "other_work": between})
    waiting = (
        max([phase.peak_between_calls, *map(_given, phase.calls), *map(_given, after.calls if after else ())]) * hosts
    )
    nothing: dict[str, object] = dict.fromkeys(
        ("calls", "call_order", "unused_blocks", "conditional_blocks", "strip_options"), ()
    )
    own = {
        "peak": waiting,
        "peak_between_calls": waiting,
        "allocator_bytes": waiting,
        "other_work": phase.other_work if hosts else (),
    }
    return phase.model_copy(update=nothing | own)


def _given(done: ComponentCall) -> int:
    """Bytes of activations that are there when a pass begins."""
    return done.block_uses[0].live_bytes_at_start if done.block_uses else 0
