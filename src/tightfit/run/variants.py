"""A call as it was measured → the variants of its denoisers' work that take fewer bytes, each measured too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.footprint import Footprint, Phase, Variant

__all__ = ["measure_variants"]

Play = Callable[[Variant], tuple[Phase, ...]]  # the phases of denoisers, as they are then
GAIN = 0.05  # of the bytes that activations want: to save less is not worth a planner's while
SHARES = (8, 32)  # of a denoiser's peak, which the inner maps of feed-forwards may take
LEAST = 2**20  # bytes for these


def measure_variants(footprint: Footprint, play: Play) -> tuple[Variant, ...]:
    """Those that save bytes; `play` does the call in a variant's way."""
    usual = tuple(footprint.phases[place] for place in footprint.denoising)
    if not usual:
        return ()
    peak = max(phase.peak for phase in usual)
    sizes = sorted({max(peak // share, LEAST) for share in SHARES}, reverse=True)
    found = _finer(_room(usual), [{"feed_forward": size} for size in sizes], play)
    room = _room(usual)
    for parts in _parts(footprint.request.batch if footprint.request else 1):
        whole = _finer(room, [parts, *({**parts, "feed_forward": size} for size in sizes)], play)
        if not whole:
            break
        found += whole
        by_blocks = {**parts, "by_blocks": True}
        found += _finer(room, [by_blocks, *({**by_blocks, "feed_forward": size} for size in sizes)], play)
    return tuple(found)


def _parts(batch: int) -> Iterator[dict[str, Any]]:
    """In what a batch can be divided, the largest parts first; how many guidance makes of it, nobody knows here."""
    if batch == 1:
        yield {"guidance": "apart"}
        return
    while batch:
        yield {"batch": batch}
        batch //= 2


def _finer(room: int, steps: list[dict[str, Any]], play: Play) -> list[Variant]:
    """The first of `steps`, each finer than the one before, as far as each saves bytes of `room`."""
    found: list[Variant] = []
    with contextlib.suppress(Exception):  # whatever stops it here would stop it on a card: it is no variant
        for step in steps:
            variant = Variant(**step, phases=())
            variant = variant.model_copy(update={"phases": play(variant)})
            needed = _room(variant.phases)
            if needed > (1 - GAIN) * room:
                break
            found.append(variant)
            room = needed
    return found


def _room(phases: tuple[Phase, ...]) -> int:
    return max((phase.room for phase in phases), default=0)
