"""Pages for copies: locked while there is RAM, without asking for that each time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tightfit.apply.weights.pinned_staging import Stager
from tightfit.devices.device import LoopbackDevice
from tightfit.devices.pinned_pool import ASK_EVERY, PinnedPool

MIB = 2**20


class Counting(LoopbackDevice):
    """Counts how often it is asked, and what it locks."""

    def __init__(self, lockable: int, *, refuses: bool = False) -> None:
        self.lockable, self.refuses = lockable, refuses
        self.asked = self.locked = self.made = 0

    def pinnable(self) -> int:
        self.asked += 1
        return self.lockable - self.locked

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        if self.refuses:
            return None
        self.locked += buffer.nbytes
        return lambda: None

    def pinned(self, size: int) -> torch.Tensor:
        self.made += size
        return super().pinned(size)


def test_it_is_asked_once_for_many_pages() -> None:
    device = Counting(2**40)
    pages = PinnedPool(device)
    kept = [pages.take(8 * MIB) for _ in range(64)]
    assert device.locked == len(kept) * 8 * MIB
    assert device.asked == device.locked // ASK_EVERY


def test_no_more_is_locked_than_there_is() -> None:
    device = Counting(100 * MIB)
    pages = PinnedPool(device)
    kept = [pages.take(8 * MIB) for _ in range(40)]
    assert device.locked == 96 * MIB
    assert len(kept) == 40


def fill(part: torch.Tensor) -> None:
    part.fill_(3)


def test_staging_makes_locked_memory_where_none_that_is_there_can_be_locked() -> None:
    for refuses in (True, False):
        device = Counting(2**40, refuses=refuses)
        stager, target = Stager(device), torch.zeros(MIB, dtype=torch.uint8)
        stager.send(device.copy_stream(), target, None, fill).wait_on_device()
        assert (target == 3).all()
        assert (device.made > 0) == refuses
        stager.close()
