"""Memory for one component's weights: the ring is as large as was planned, for weights as they are by then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.apply.weights.device_pool import DeviceWeightPool
from tightfit.devices.device import LoopbackDevice
from tightfit.measure.recorder import Recorder

KIB = 2**10


class Weights:
    """What stands for a parcel: a name, bytes, and the alignment of its home."""

    store = SimpleNamespace(alignment=128)

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size


@pytest.mark.parametrize(("ring", "of_doubles"), [(32 * KIB, 64 * KIB), (40 * KIB, 80 * KIB)])
def test_the_ring_grows_with_what_passes_through(ring: int, of_doubles: int) -> None:
    device = LoopbackDevice()
    groups: Any = [Weights("a", 8 * KIB), Weights("largest", 32 * KIB), Weights("stays", 16 * KIB)]
    rooms = DeviceWeightPool(groups, {"stays"}, ring, device, Recorder(device))
    found = []
    for factor in (1, 2, 0.5):
        for group in groups:
            group.size = int(group.size * factor)
        rooms.open()
        assert rooms.take() == []
        assert rooms.lease(groups[1]) is not None
        found.append(rooms.whole)
        rooms.clear()
    assert found == [ring + 16 * KIB, of_doubles + 32 * KIB, ring + 16 * KIB]


def test_the_ring_takes_the_largest_where_only_that_has_grown() -> None:
    device = LoopbackDevice()
    groups: Any = [Weights("a", 128 * KIB), Weights("grows", 8 * KIB)]
    rooms = DeviceWeightPool(groups, set(), 128 * KIB, device, Recorder(device))
    groups[1].size = 256 * KIB - 1
    rooms.open()
    rooms.take()
    assert rooms.lease(groups[1]) is not None
