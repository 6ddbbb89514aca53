"""Streams by the names of `torch.cuda`, and hosts without numbers: what offloading of others asks for."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from simulator.conftest import MakeCards
from tightfit import RunError
from tightfit.simulator.host_memory import is_valueless, mark_valueless

SIZE = 25 * 10**6  # bytes that take a millisecond over the link
LAUNCH, CROSSING = 5_000, 10**6  # nanoseconds
NAMES = torch.get_device_module  # `torch.simulated`, once a card is in use


def test_copies_on_a_stream_of_their_own_pass_beside_work(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    module = NAMES("privateuseone")
    stream, usual = module.Stream(), module.current_stream()
    source = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    one = torch.zeros(4096, 4096, device="privateuseone")
    card.timeline.synchronize()
    begun = card.now
    with module.stream(stream):
        assert module.current_stream().stream_id == stream.stream_id != usual.stream_id
        there = source.to("privateuseone", non_blocking=True)
    assert module.current_stream().stream_id == usual.stream_id
    worked = one @ one
    assert card.now - begun < CROSSING + 2 * 4096**3 / 50e12 * 1e9
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert CROSSING <= card.host.now - begun <= CROSSING + 3 * LAUNCH
    assert there.nbytes == SIZE
    assert worked.shape == one.shape


def test_a_stream_waits_for_another(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    module = NAMES("privateuseone")
    stream, usual = module.Stream("privateuseone:0"), module.current_stream("privateuseone:0")
    with module.stream(stream), module.stream(None):
        there = torch.zeros(SIZE, dtype=torch.uint8).pin_memory().to("privateuseone", non_blocking=True)
    there.record_stream(usual)
    assert card.allocator.history[-1].what == "use"
    usual.wait_stream(stream)
    before = card.now
    there + 1
    assert card.now > before
    assert usual.stream_id == 0


def test_memory_is_told_as_cuda_tells_it(make_cards: MakeCards) -> None:
    make_cards(capacity=2**30)
    module = NAMES("privateuseone")
    assert module.mem_get_info() == (2**30, 2**30)
    held = torch.empty(3 * 2**20, dtype=torch.uint8, device="privateuseone")
    assert (module.memory_allocated(), module.memory_reserved("privateuseone:0")) == (3 * 2**20, 20 * 2**20)
    assert module.mem_get_info(0) == (2**30 - 20 * 2**20, 2**30)
    del held
    assert (module.memory_allocated(0), module.memory_reserved()) == (0, 20 * 2**20)
    module.empty_cache()
    assert module.mem_get_info("privateuseone:0") == (2**30, 2**30)


def test_weights_that_hold_nothing_go_there_and_back(make_cards: MakeCards) -> None:
    (card,) = make_cards(values="shapes")
    weight = mark_valueless(torch.empty(SIZE // 4))
    there = weight.to("privateuseone")
    back = there.half().to("cpu")
    assert (card.bytes_in, card.bytes_out) == (SIZE, SIZE // 2)
    assert is_valueless(back)
    assert is_valueless(back.pin_memory())
    assert back.pin_memory().is_pinned()
    assert not is_valueless(torch.empty(SIZE // 4))
    with pytest.raises(RunError, match="needs the numbers"):
        (there * 2).to("cpu")
    there.copy_(torch.zeros(SIZE // 4))
    with pytest.raises(RunError, match="needs the numbers"):
        there.to("cpu")


def test_what_holds_nothing_costs_nothing(make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    process, size = psutil.Process(os.getpid()), 2**30
    before = process.memory_info().rss
    weight = mark_valueless(torch.empty(size, dtype=torch.uint8)).pin_memory()
    there = weight.to("privateuseone", non_blocking=True)
    back = there.to("cpu")
    assert process.memory_info().rss - before < size / 8
    assert back.nbytes == size
