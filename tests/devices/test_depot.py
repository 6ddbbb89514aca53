"""Bytes that wait in host memory: they come back as they went, whenever copies are done, and nothing stays behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from devices.late import LateCard
from simulator.conftest import ACCELERATOR
from tightfit.devices import pinned_pool as depots
from tightfit.devices.device import Device, LoopbackDevice
from tightfit.devices.pinned_pool import ActivationHostPool, PinnedPool, bytes_of, is_dense
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard, Values
from tightfit.simulator.timeline import Host

LINK = 25e9  # bytes a second


@pytest.fixture
def simulated() -> Iterator[Callable[..., SimulatedDevice]]:
    """Makes a simulated card whose link is as fast one way as the other, until the test is over."""

    def make(values: Values = "real") -> SimulatedDevice:
        like = ACCELERATOR.model_copy(update={"link_rate": LINK, "launch_overhead": 0.0})
        use_cards([SimulatedCard(0, like, Host(), values)])
        return SimulatedDevice()

    yield make
    use_cards(())


def numbers(count: int, device: Device, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + count) % 251).to(torch.uint8).to(device.torch_device)


@pytest.mark.parametrize("where", ["loopback", "late", "simulated"])
def test_what_went_comes_back(where: str, simulated: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depots, "PAGE", 64)  # so that most pieces lie on several
    device = {"loopback": LoopbackDevice, "late": LateCard, "simulated": simulated}[where]()
    host_pool = ActivationHostPool(device)
    for size in (1, 64, 1000):
        tape = host_pool.tape(size)
        for start in range(0, size, 90):
            tape.write(numbers(min(90, size - start), device, start))
        for start, end in ((0, size), (size // 3, size // 2 + 1), (size - 1, size)):
            target = torch.zeros(end - start, dtype=torch.uint8, device=device.torch_device)
            tape.read(start, target).settle()
            assert torch.equal(target.cpu(), numbers(size, LoopbackDevice())[start:end]), (start, end)
    host_pool.close()


def test_rows_are_read_while_later_ones_are_written() -> None:
    host_pool = ActivationHostPool(LateCard())
    tape, found = host_pool.tape(40), torch.zeros(10, dtype=torch.uint8)
    tape.write(numbers(10, LateCard()))
    handle = tape.read(0, found)
    tape.write(numbers(30, LateCard(), 10))
    handle.settle()
    assert torch.equal(found, numbers(10, LateCard()))
    assert tape.written == 40


def test_what_is_being_copied_is_kept_as_long_and_no_longer() -> None:
    host_pool = ActivationHostPool(LateCard())
    tape = host_pool.tape(200)
    ghosts = []
    for start in (0, 100):
        source = numbers(100, LateCard(), start)
        ghosts.append(weakref.ref(source))
        tape.write(source)
        del source
        assert [ghost() is None for ghost in ghosts] == [True] * (len(ghosts) - 1) + [False]
    tape.sent()
    assert ghosts[-1]() is None
    target = torch.zeros(200, dtype=torch.uint8)
    ghosts.append(weakref.ref(target))
    tape.read(0, target)  # nobody waits for it
    del target
    assert ghosts[-1]() is not None
    host_pool.settle()
    assert ghosts[-1]() is None


def test_forgotten_pages_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depots, "PAGE", 100)
    made: list[int] = []

    class Counting(LateCard):
        def allocate_host(self, size: int) -> torch.Tensor:
            made.append(size)
            return super().allocate_host(size)

    host_pool = ActivationHostPool(Counting())
    for _ in range(3):
        tape = host_pool.tape(1050)
        for start in range(0, 1050, 100):
            tape.write(numbers(min(100, 1050 - start), LateCard(), start))
            target = torch.zeros(min(100, 1050 - start), dtype=torch.uint8)
            tape.read(start, target).settle()
            assert torch.equal(target, numbers(target.nbytes, LateCard(), start))
            tape.forget(start + 100)
    assert made == [100, 50]


class Locking(LoopbackDevice):
    """Page-locks at most `most` pieces, and notes what happens to them."""

    def __init__(self, most: int, room: int = 2**40) -> None:
        self.most, self.pinned = most, room
        self.locked, self.asked = 0, 0

    def pinnable(self) -> int:
        return self.pinned

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        self.asked += 1
        if self.locked == self.most:
            return None
        self.locked += 1

        def unlock() -> None:
            self.locked -= 1

        return unlock


def test_pages_are_locked_once_until_that_is_refused_and_unlocked_at_the_end() -> None:
    device = Locking(most=2)
    pages = PinnedPool(device)
    held = [pages.take(4096) for _ in range(4)]
    assert (device.locked, device.asked) == (2, 3)  # who was refused does not ask again
    addresses = {page.data_ptr() for page in held}
    held.clear()
    assert {page.data_ptr() for page in [pages.take(4096) for _ in range(4)]} == addresses
    assert device.asked == 3
    held.append(pages.take(4096))
    pages.close()
    assert device.locked == 0
    held[0].fill_(1)  # memory that somebody holds stays


def test_no_more_is_locked_than_can_be() -> None:
    device = Locking(most=9, room=5000)
    pages = PinnedPool(device)
    both = [pages.take(4096), pages.take(8192)]
    assert (device.locked, device.asked, len(both)) == (1, 1, 2)


def test_whoever_forgets_to_close_leaves_nothing_locked() -> None:
    device = Locking(most=9)
    host_pool = ActivationHostPool(device)
    host_pool.tape(100).write(numbers(100, device))
    assert device.locked == 1
    del host_pool
    assert device.locked == 0


def test_pages_serve_calls_in_any_mode() -> None:
    pages = PinnedPool(LoopbackDevice())
    with torch.inference_mode():
        page = pages.take(16)
        page.copy_(torch.ones(16, dtype=torch.uint8))
    page.fill_(2)
    assert not page.is_inference()


@pytest.mark.parametrize("values", ["real", "shapes"])
def test_copies_take_their_time_beside_the_arithmetic(
    values: Values, simulated: Callable[[Values], SimulatedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depots, "PAGE", 5_000_000)
    device = simulated(values)
    host_pool, size = ActivationHostPool(device), 25_000_000  # a millisecond over the link
    out, back = host_pool.tape(size), host_pool.tape(size)
    sources = [torch.zeros(size, dtype=torch.uint8, device="privateuseone") for _ in range(2)]
    back.write(sources[0])
    host_pool.settle()
    device.synchronize()
    begin, timeline = device.card.now, device.card.timeline
    out.write(sources[1])
    handle = back.read(0, sources[0])
    assert device.card.host.now == timeline.record(0).time.now == begin  # nobody has waited
    handle.settle()
    assert timeline.record(0).time.now == begin + 1_000_000  # arithmetic goes on when it has come; both ways at once
    out.sent()
    assert timeline.record(0).time.now == begin + 1_000_000
    assert device.card.host.now == begin
    assert (device.card.bytes_in, device.card.bytes_out) == (size, 2 * size)
    host_pool.close()


def test_dense_is_every_number_once_side_by_side() -> None:
    whole = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    for dense in (whole, whole.transpose(0, 2), whole[1:], whole.unsqueeze(1), whole[:0]):
        assert is_dense(dense)
        assert bytes_of(dense).nbytes == dense.nbytes
    assert torch.equal(bytes_of(whole[1:].transpose(0, 2)).view(torch.int32), torch.arange(12, 24, dtype=torch.int32))
    assert not any(
        map(is_dense, (whole[:, 1:], whole[..., ::2], whole.expand(2, 2, 3, 4), whole.as_strided((4, 4), (1, 1))))
    )
