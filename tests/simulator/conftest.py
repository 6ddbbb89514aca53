"""Simulated cards for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tightfit.schema.machine import Accelerator
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard, Values
from tightfit.simulator.timeline import Host

ACCELERATOR = Accelerator(
    name="a card",
    kind="simulated",
    bytes=2**40,
    compute_capability="8.9",
    arithmetic_rates={"float32": 50e12, "bfloat16": 100e12},
    memory_rate=1e12,
    link_rate=25e9,
    launch_overhead=5e-6,
)
MakeCards = Callable[..., list[SimulatedCard]]


@pytest.fixture
def make_cards() -> Iterator[MakeCards]:
    """Puts `count` cards of `capacity` bytes into use, until the test is over."""

    def make(
        count: int = 1,
        *,
        values: Values = "real",
        capacity: int = 2**40,
        capability: str = "8.9",
        kind: str = "simulated",
    ) -> list[SimulatedCard]:
        host = Host()
        given = {"bytes": capacity, "compute_capability": capability, "kind": kind}
        like = ACCELERATOR.model_copy(update=given)
        cards = [SimulatedCard(index, like, host, values) for index in range(count)]
        use_cards(cards)
        return cards

    yield make
    use_cards(())
