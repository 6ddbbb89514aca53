"""Copies between the host and cards: what is pinned, and who waits for whom."""

from __future__ import annotations

import gc

import pytest
import torch

from simulator.conftest import MakeCards
from tightfit.catalog.cuda import PAGEABLE

SIZE = 25 * 10**6  # bytes that take a millisecond over the link
LAUNCH, CROSSING, PAGEABLE_CROSSING = 5_000, 10**6, round(10**6 / PAGEABLE)  # nanoseconds


def host_bytes() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def test_pinned_memory_is_a_copy_that_is_known(make_cards: MakeCards) -> None:
    make_cards()
    plain = torch.arange(6.0).reshape(2, 3)
    pinned = plain.pin_memory()
    assert torch.equal(pinned, plain)
    assert pinned.data_ptr() != plain.data_ptr()
    assert (pinned.is_pinned(), pinned[1:].is_pinned(), plain.is_pinned()) == (True, True, False)
    assert pinned.pin_memory() is pinned
    assert not pinned.clone().is_pinned()
    assert not pinned.to("privateuseone").is_pinned()


def test_an_address_that_is_used_again_is_not_pinned(make_cards: MakeCards) -> None:
    make_cards()
    for _ in range(3):  # the allocator gives the same address out again
        address = host_bytes().pin_memory().data_ptr()
        gc.collect()
        again = [host_bytes() for _ in range(3)]
        assert not any(tensor.is_pinned() for tensor in again), address


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "crossing", "waits"),
    [
        (True, True, CROSSING, False),
        (True, False, CROSSING, True),
        (False, True, PAGEABLE_CROSSING, True),
        (False, False, PAGEABLE_CROSSING, True),
    ],
)
def test_the_host_waits_for_pageable_memory(
    pinned: bool, non_blocking: bool, crossing: int, waits: bool, make_cards: MakeCards
) -> None:
    (card,) = make_cards()
    source = host_bytes().pin_memory() if pinned else host_bytes()
    there = source.to("privateuseone", non_blocking=non_blocking)
    assert card.now == LAUNCH + crossing
    assert card.host.now == LAUNCH + (crossing if waits else 0)
    card.timeline.synchronize()
    begin = card.host.now
    target = torch.empty_like(source).pin_memory() if pinned else torch.empty_like(source)
    target.copy_(there, non_blocking=non_blocking)
    assert card.host.now - begin == LAUNCH + (crossing if waits else 0)
    assert card.now - begin == LAUNCH + crossing
    assert torch.equal(target, source)


def test_nobody_waits_for_nothing(make_cards: MakeCards) -> None:
    """Caches of language models begin as `torch.tensor([], device=…)`, for every layer."""
    (card,) = make_cards()
    busy = host_bytes().pin_memory().to("privateuseone", non_blocking=True)
    before = card.host.now, card.now
    assert torch.tensor([], device="privateuseone").to("cpu").numel() == 0
    assert (card.host.now, card.now) == before
    assert busy.numel() == SIZE


def test_what_comes_back_without_waiting_is_pinned(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    there = torch.arange(6, device="privateuseone").reshape(2, 3).t()
    back = there.to("cpu", non_blocking=True)
    assert back.is_pinned()
    assert back.stride() == there.stride()
    assert torch.equal(back, torch.arange(6).reshape(2, 3).t())
    assert card.host.now < card.now
    assert there.to("cpu", torch.float16, non_blocking=True).dtype == torch.float16
    assert not there.to("cpu").is_pinned()
    assert card.host.now == card.now


def test_a_copy_to_another_card_begins_when_its_source_is_done(make_cards: MakeCards) -> None:
    first, second = make_cards(2)
    source = host_bytes().pin_memory().to("privateuseone:0", non_blocking=True)
    arrived = first.now
    assert torch.equal(source.to("privateuseone:1", non_blocking=True).cpu(), host_bytes())
    assert second.bytes_in == SIZE
    assert second.now >= arrived + CROSSING


def test_another_stream_is_told_of(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    tensor = torch.zeros(4, device="privateuseone")
    tensor.record_stream(torch.Stream("privateuseone"))
    assert card.allocator.history[-1].what == "use"
