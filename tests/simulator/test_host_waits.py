"""What networks gave back is copied to host memory while the card works on; nobody waits for that."""

from __future__ import annotations

import pytest
import torch

from simulator.conftest import MakeCards
from tightfit.apply.output_replay import OutputReplayCache
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator.card import SimulatedCard, Values

SIZES = [3, 2**12, 2**21]  # numbers in a result


def waits_of(card: SimulatedCard) -> list[int]:
    """Grows when the host waits for all that it gave to the card."""
    waits: list[int] = []
    card.sync_callbacks.append(lambda _: waits.append(card.host.now))
    return waits


@pytest.mark.parametrize("values", ["real", "shapes"])
def test_the_host_does_not_wait_for_what_is_kept(values: Values, make_cards: MakeCards) -> None:
    (card,) = make_cards(values=values)
    device, waits = SimulatedDevice(0), waits_of(card)
    finished, factors = OutputReplayCache(device), torch.ones(2048, 2048, device=device.torch_device)
    finished.active = True
    for size in SIZES:
        finished.once(lambda size=size: (factors @ factors).flatten()[:size])
    assert waits == []
    assert card.host.now < card.timeline.end.now
    finished.begin_again()
    if values == "real":
        given = [finished.once(lambda: pytest.fail("done twice")) for _ in SIZES]
        assert all(torch.equal(one.cpu(), torch.full((size,), 2048.0)) for one, size in zip(given, SIZES, strict=True))
    finished.close()


@pytest.mark.parametrize("values", ["real", "shapes"])
def test_a_lane_waits_where_memory_was_not_locked(values: Values, make_cards: MakeCards) -> None:
    (card,) = make_cards(values=values)
    device, waits = SimulatedDevice(0), waits_of(card)
    stream, there, room = device.copy_stream(), device.allocate(2**20), device.allocate_host(2**20)
    stream.send(room, there)
    assert len(waits) == 1
    assert device.lock_pages(room) is not None
    stream.send(room[2**10 :], there[2**10 :])
    assert len(waits) == 1
