"""How much of a card a plan leaves to what it cannot foresee."""

from __future__ import annotations

import pytest

from tightfit.plan.component_cost import SEGMENT
from tightfit.plan.forecast import most_weights, needed_bytes
from tightfit.schema.machine import Accelerator

MIB = 2**20
CARD = Accelerator(name="cuda:0", kind="cuda", bytes=2**35, compute_capability="8.9")
CPU = Accelerator(name="cpu", kind="cpu", bytes=2**35)


@pytest.mark.parametrize("device", [CARD, CPU])
@pytest.mark.parametrize("size", [200 * MIB, 1849 * MIB, 1850 * MIB, 1900 * MIB, 2**33 + 1])
def test_most_weights_are_just_within(size: int, device: Accelerator) -> None:
    room = 30 * MIB
    most = most_weights(size, room, device)
    assert needed_bytes(most, room, device) <= size < needed_bytes(most + 1, room, device) + SEGMENT
    assert needed_bytes(most + 1, room, device) > size // SEGMENT * SEGMENT


@pytest.mark.parametrize(("peak", "beside"), [(100 * MIB, 50 * MIB), (1500 * MIB, 50 * MIB), (4000 * MIB, 71 * MIB)])
def test_a_page_of_the_allocator_is_kept_or_a_percent_if_that_is_more(
    peak: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.plan.forecast.KEEPS_WORKSPACE", False)  # else it is part of what a plan needs
    assert peak - most_weights(peak, 0, CARD) == pytest.approx(beside, abs=MIB)
