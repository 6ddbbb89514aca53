"""Simulated cards that never run out of memory, in use for as long as something is measured on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tightfit.schema.machine import Accelerator
from tightfit.simulator.backend import SIMULATOR_LOCK, cards_in_use, use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

__all__ = ["unlimited_card", "unlimited_cards"]

ROOM = 2**60  # bytes of a simulated card


@contextlib.contextmanager
def unlimited_card(like: Accelerator) -> Iterator[SimulatedCard]:
    """Yield a simulated card like `like` with unlimited memory, in use as "simulated:0" inside the block."""
    with unlimited_cards([like]) as (card,):
        yield card


@contextlib.contextmanager
def unlimited_cards(likes: Sequence[Accelerator]) -> Iterator[list[SimulatedCard]]:
    """The same for several cards of one computer, numbered from "simulated:0" on; other threads wait meanwhile."""
    with SIMULATOR_LOCK:
        before, host = cards_in_use(), Host()
        models = [like.model_copy(update={"bytes": ROOM}) for like in likes]
        use_cards(cards := [SimulatedCard(index, model, host) for index, model in enumerate(models)])
        try:
            yield cards
        finally:
            use_cards(before)
            for card in cards:  # else tensors, which know their card, would keep each other alive through its callbacks
                card.forget_callbacks()
