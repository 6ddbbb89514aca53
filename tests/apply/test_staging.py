"""Weights on their way to a card through a buffer: in order, never overwritten too early, while the host goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tightfit import ModelError
from tightfit.apply.weights import pinned_staging as staging
from tightfit.apply.weights.pinned_staging import Stager
from tightfit.devices.copy_stream import CopyHandle, HostCopyStream, LateCopyStream
from tightfit.devices.device import LoopbackDevice

KILO = 1024


@pytest.fixture
def stager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stager]:
    monkeypatch.setattr(staging, "SIZE", 16 * KILO)
    stager = Stager(LoopbackDevice())
    yield stager
    stager.close()


class Gate:
    """A fill that waits until it is let through."""

    def __init__(self, value: int = 0) -> None:
        self.begun, self.may_go, self.value = threading.Event(), threading.Event(), value

    def __call__(self, part: torch.Tensor) -> None:
        self.begun.set()
        assert self.may_go.wait(10)
        part.fill_(self.value)


def room(size: int) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)


def filled(value: int) -> Callable[[torch.Tensor], None]:
    def fill(part: torch.Tensor) -> None:
        part.fill_(value)

    return fill


def test_all_arrives_through_a_small_buffer_that_grows_where_it_must(stager: Stager) -> None:
    sizes = [3 * KILO, 16 * KILO, 40 * KILO, 5 * KILO, 80 * KILO, 1] * 5
    targets = [room(size) for size in sizes]
    handles = [stager.send(LateCopyStream(), t, None, filled(i)) for i, t in enumerate(targets)]
    for number, (handle, target) in enumerate(zip(handles, targets, strict=True)):
        handle.wait_on_device()
        assert target.eq(number).all()


def test_a_part_is_not_filled_again_before_its_copy_is_complete(stager: Stager) -> None:
    complete: list[int] = []

    class Slow(CopyHandle):
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            complete.append(self.number)

    class SlowLane(HostCopyStream):
        sent = 0

        def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> CopyHandle:
            self.sent += 1
            return Slow(self.sent - 1)

    stream, seen = SlowLane(), []
    for _ in range(8):
        handle = stager.send(stream, room(8 * KILO), None, lambda _: seen.append(len(complete)))
    handle.wait_on_device()
    assert seen == [0, 0, 1, 2, 3, 4, 5, 6]  # there is room for two
    assert complete == list(range(6))


def test_the_host_goes_on_and_waits_only_for_what_has_not_come(stager: Stager) -> None:
    gate, target = Gate(7), room(KILO)
    handle = stager.send(HostCopyStream(), target, None, gate)
    assert gate.begun.wait(10)
    assert target.eq(255).all()
    threading.Timer(0.05, gate.may_go.set).start()
    assert handle.wait_on_device() > 0.03
    assert target.eq(7).all()
    assert handle.wait_on_device() < 0.03


def test_what_is_abandoned_before_its_turn_is_never_written(stager: Stager) -> None:
    gate, target = Gate(), room(KILO)
    first = stager.send(HostCopyStream(), room(KILO), None, gate)
    second = stager.send(HostCopyStream(), target, None, filled(1))
    second.cancel()
    gate.may_go.set()
    first.wait_on_device()
    stager.send(HostCopyStream(), room(KILO), None, filled(2)).wait_on_device()
    assert target.eq(255).all()


def test_what_is_abandoned_in_its_turn_is_complete_then(stager: Stager) -> None:
    gate, target = Gate(3), room(KILO)
    handle = stager.send(LateCopyStream(), target, None, gate)
    assert gate.begun.wait(10)
    threading.Timer(0.05, gate.may_go.set).start()
    handle.cancel()
    assert gate.may_go.is_set()
    assert target.eq(3).all()


def test_an_error_is_told_to_who_waits_and_to_nobody_else(stager: Stager) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ModelError("the file ends too soon")

    bad = stager.send(HostCopyStream(), room(12 * KILO), None, fail)
    good = stager.send(HostCopyStream(), target := room(12 * KILO), None, filled(5))
    for _ in range(2):
        with pytest.raises(ModelError, match="too soon"):
            bad.wait_on_device()
    bad.cancel()
    good.wait_on_device()
    assert target.eq(5).all()


def test_tensors_made_in_inference_mode_can_be_targets(stager: Stager) -> None:
    with torch.inference_mode():
        target = room(KILO)
        stager.send(HostCopyStream(), target, None, filled(9)).wait_on_device()
        assert target.eq(9).all()


def test_close_unlocks_what_was_locked_and_ends_the_thread() -> None:
    locked: list[int] = []

    class Locking(LoopbackDevice):
        def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
            locked.append(buffer.nbytes)
            return partial(locked.remove, buffer.nbytes)

    before = threading.active_count()
    stager = Stager(Locking())
    stager.send(HostCopyStream(), room(KILO), None, filled(1)).wait_on_device()
    assert locked == [staging.SIZE]
    stager.close()
    assert locked == []
    assert threading.active_count() == before
