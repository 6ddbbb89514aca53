"""What networks gave back is given back once more, in the same order, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from tightfit.apply import output_replay as again
from tightfit.apply.output_replay import OutputReplayCache, RngState
from tightfit.devices.copy_stream import LateCopyStream
from tightfit.devices.device import CpuDevice, LoopbackDevice
from tightfit.devices.pinned_pool import PAGE
from tightfit.devices.simulated import SimulatedDevice
from tightfit.errors import RunError
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentRun
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host


class Work:
    """Gives `value`, and counts how often it was done."""

    def __init__(self, value: Any) -> None:
        self.value, self.times = value, 0

    def __call__(self) -> Any:
        self.times += 1
        return self.value


class LateDevice(LoopbackDevice):
    """Copies are made when somebody waits for them."""

    def copy_stream(self) -> LateCopyStream:
        return LateCopyStream()


@pytest.fixture(params=[LoopbackDevice, CpuDevice, LateDevice])
def finished(request: pytest.FixtureRequest) -> Iterator[OutputReplayCache]:
    made = OutputReplayCache(request.param())
    made.active = True
    yield made
    made.forget()


def test_results_come_back_as_they_were_though_others_wrote_into_them(finished: OutputReplayCache) -> None:
    works = [
        Work((torch.arange(6.0).reshape(2, 3).T, None, "text")),
        Work(Transformer2DModelOutput(sample=torch.ones(2, 2))),
        Work(torch.arange(4)),
    ]
    first = [finished.once(work) for work in works]
    assert all(result is work.value for result, work in zip(first, works, strict=True))
    first[0][0].zero_()
    first[1].sample.zero_()
    finished.begin_again()
    assert finished.count == 3
    one, two, three = (finished.once(work) for work in works)
    assert torch.equal(one[0], torch.arange(6.0).reshape(2, 3).T)
    assert one[1:] == (None, "text")
    assert isinstance(two, Transformer2DModelOutput)
    assert torch.equal(two.sample, torch.ones(2, 2))
    assert torch.equal(three, torch.arange(4))
    assert [work.times for work in works] == [1, 1, 1]
    assert finished.once(late := Work(torch.zeros(1))) is late.value
    finished.forget()
    finished.once(works[0])
    assert works[0].times == 2


def test_what_nobody_can_copy_and_what_is_too_much_is_done_again(
    finished: OutputReplayCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again, "MOST_BYTES", 100)
    works = [Work(object()), Work(torch.zeros(20)), Work(torch.zeros(20)), Work(torch.zeros(5))]
    for work in works:
        finished.once(work)
    finished.begin_again()
    assert finished.count == 2
    for work in works:
        finished.once(work)
    assert [work.times for work in works] == [2, 1, 2, 1]


def test_what_is_kept_takes_no_memory_of_the_device() -> None:
    card = SimulatedCard(0, Accelerator(name="a card", kind="cuda", bytes=2**30), Host(), values="real")
    use_cards([card])
    try:
        finished, device = OutputReplayCache(SimulatedDevice()), torch.device("privateuseone")
        finished.active = True
        values = [torch.rand(5, 3).to(device), torch.rand(3, 5).to(device).T, torch.rand(6, 6).to(device)[:, 1:]]
        before, peak = card.allocator.allocated.now, card.allocator.allocated.peak
        for value in values[:2]:
            finished.once(Work(value))
        assert card.allocator.allocated.peak == peak
        finished.once(Work(values[2]))  # with gaps in its memory, which no copy leaves out
        assert SimulatedDevice().allocated_bytes() == before
        finished.begin_again()
        for value in values:
            assert torch.equal(finished.once(Work(None)).cpu(), value.cpu())
    finally:
        use_cards(())


@pytest.mark.parametrize("error", [RunError("the disk is full"), FileNotFoundError("no folder for temporary files")])
def test_where_no_file_can_be_written_it_is_done_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise error

    monkeypatch.setattr(again, "SpillFile", full)
    finished, work = OutputReplayCache(CpuDevice()), Work(torch.zeros(5))
    finished.active = True
    for _ in range(2):
        assert finished.once(work) is work.value
        finished.begin_again()
    assert work.times == 2
    assert finished.count == 0


def test_outside_a_call_nothing_is_kept(finished: OutputReplayCache) -> None:
    finished.active = False
    work = Work(torch.zeros(1))
    for _ in range(2):
        assert finished.once(work) is work.value
    assert work.times == 2
    assert finished.count == 0


@pytest.mark.parametrize("several", [False, True])
def test_generators_go_back(several: bool) -> None:
    own = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    draw: list[Callable[[], torch.Tensor]] = [
        lambda: torch.rand(3), lambda: torch.rand(3, generator=own[0]), lambda: torch.rand(3, generator=own[1]),
    ]  # fmt: skip
    given = own if several else own[0]
    draws = RngState({"generator": given}, LoopbackDevice())
    before = [one() for one in draw]
    draws.rewind()
    same = [torch.equal(one(), value) for one, value in zip(draw, before, strict=True)]
    assert same == [True, True, several]


def test_the_last_pass_of_the_plan_is_not_kept(finished: OutputReplayCache) -> None:
    stints = [("vae", "decode", 1), ("unet", "forward", 2), ("vae", "decode", 2)]
    finished.forget([ComponentRun(component=name, method=method, runs=runs) for name, method, runs in stints])
    passes = [((name, method), Work(torch.zeros(3))) for name, method, runs in stints for _ in range(runs)]
    for _ in range(2):
        for what, work in passes:
            finished.once(work, what)
        finished.begin_again()
    assert [work.times for _, work in passes] == [1, 1, 1, 1, 2]
    assert finished.count == 4


def test_small_results_share_host_memory_which_the_next_call_uses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, taken = LoopbackDevice(), list[int]()
    room = device.allocate_host
    monkeypatch.setattr(device, "allocate_host", lambda size: taken.append(size) or room(size))
    finished = OutputReplayCache(device)
    finished.active = True
    values = [torch.full((200,), float(number)) for number in range(4)] + [torch.zeros(0), torch.ones(PAGE // 4 + 1)]
    for _ in range(2):
        finished.forget()
        for value in values:
            finished.once(Work(value))
        finished.begin_again()
        for value in values:
            assert torch.equal(finished.once(Work(None)), value)
    assert taken == [PAGE, 2 * PAGE]
    finished.close()
    finished.once(Work(values[0]))
    assert taken == [PAGE, 2 * PAGE, PAGE]


def test_what_may_have_had_other_effects_is_done_again(finished: OutputReplayCache) -> None:
    finished.active = True
    pure, recorded = Work(torch.ones(1)), Work(torch.ones(2))
    for work, keeps in ((pure, True), (recorded, False)):
        finished.once(work, keeps=keeps)
    finished.begin_again()
    for work, keeps in ((pure, True), (recorded, False)):
        finished.once(work, keeps=keeps)
    assert (pure.times, recorded.times) == (1, 2)
