"""Allocation histories made by hand, and what torch's CUDA caching allocator would count."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.simulator import allocator_replay
from tightfit.simulator.allocator import AllocatorEvent, CachingAllocator, CardFull
from tightfit.simulator.allocator_replay import (
    least_capacity,
    least_capacity_of_moves,
    lowest_fitting,
    replay,
    rounded_peak,
)
from tightfit.simulator.blocks import Block, rounded, segment_size

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Never:
    """An event of a stream that is far behind, until somebody waits."""

    passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.passed = True


def card(capacity: int = 24 * GIB, *, expandable: bool = False) -> CachingAllocator:
    return CachingAllocator(capacity, lambda stream: Never(), expandable=expandable)


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (GIB + 1, GIB + 512, GIB + 2 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(size: int, block: int, segment: int) -> None:
    assert rounded(size) == block
    assert segment_size(block) == segment
    allocator = card()
    allocator.malloc(size)
    assert allocator.reserved.now == segment


def test_small_requests_share_a_segment() -> None:
    allocator = card()
    blocks = [allocator.malloc(MIB // 2) for _ in range(4)]
    assert (allocator.allocated.now, allocator.reserved.now) == (2 * MIB, 2 * MIB)
    assert [block.address - blocks[0].address for block in blocks] == [0, MIB // 2, MIB, 3 * MIB // 2]
    allocator.malloc(1)
    assert (allocator.allocated.now, allocator.reserved.now) == (2 * MIB + 512, 4 * MIB)


def test_a_rest_of_a_mebibyte_or_less_goes_with_the_block() -> None:
    allocator = card()
    allocator.free(allocator.malloc(20 * MIB))
    block = allocator.malloc(19 * MIB)
    assert block.size == allocator.allocated.now == 20 * MIB
    assert allocator.requested.now == 19 * MIB
    allocator.free(block)
    assert allocator.malloc(19 * MIB - 512).size == 19 * MIB - 512


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = card()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    addresses = large.address, small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(25 * MIB).address == addresses[1]
    assert allocator.malloc(25 * MIB).address == addresses[0]
    assert allocator.reserved.now == 70 * MIB


def test_freed_neighbours_become_one_block() -> None:
    allocator = card()
    first, second, third = (allocator.malloc(5 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert allocator.malloc(6 * MIB).address != first.address
    allocator.free(second)
    assert allocator.malloc(9 * MIB).address == first.address


def test_streams_do_not_share_what_is_free() -> None:
    allocator = card()
    allocator.free(allocator.malloc(64 * MIB, stream=0))
    allocator.malloc(64 * MIB, stream=1)
    assert allocator.reserved.now == 128 * MIB


def test_a_block_waits_for_the_streams_that_used_it() -> None:
    events: list[Never] = []

    def record(stream: int) -> Never:
        assert stream == 7
        events.append(Never())
        return events[-1]

    allocator = CachingAllocator(GIB, record)
    block = allocator.malloc(64 * MIB)
    allocator.use(block, 7)
    allocator.use(block, 0)  # its own: no event
    allocator.free(block)
    assert allocator.allocated.now == 0
    other = allocator.malloc(64 * MIB)
    assert allocator.reserved.now == 128 * MIB
    events[0].passed = True
    again = allocator.malloc(64 * MIB)
    assert again.address != other.address
    assert allocator.reserved.now == 128 * MIB
    assert len(events) == 1


def test_a_full_card_gives_its_cache_back_before_it_refuses() -> None:
    allocator = card(100 * MIB)
    kept = allocator.malloc(10 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    assert allocator.reserved.now == 70 * MIB
    allocator.malloc(80 * MIB)
    assert (allocator.reserved.now, allocator.reserved.peak, allocator.retries) == (90 * MIB, 90 * MIB, 1)
    with pytest.raises(CardFull) as refused:
        allocator.malloc(12 * MIB)
    assert (refused.value.requested, refused.value.allocated) == (12 * MIB, 90 * MIB)
    assert kept.used


def test_segments_in_use_are_not_given_back() -> None:
    allocator = card()
    kept = allocator.malloc(4 * MIB)
    allocator.free(allocator.malloc(4 * MIB))
    allocator.free(allocator.malloc(50 * MIB))
    allocator.empty_cache()
    assert allocator.reserved.now == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved.now == 0


def test_expandable_segments_grow_by_pages() -> None:
    allocator = card(expandable=True)
    allocator.malloc(25 * MIB)
    assert (allocator.allocated.now, allocator.reserved.now) == (25 * MIB, 40 * MIB)
    allocator.malloc(14 * MIB)
    assert allocator.reserved.now == 40 * MIB
    allocator.malloc(512)
    assert allocator.reserved.now == 42 * MIB


def test_an_expandable_segment_has_no_holes_that_fit_nothing() -> None:
    """What fragments ordinary segments: ever larger requests, each after the one before was freed."""
    fixed, grown = card(), card(expandable=True)
    for size in (100, 120, 140, 160):
        for allocator in (fixed, grown):
            allocator.free(allocator.malloc(size * MIB))
    assert fixed.reserved.now == (100 + 120 + 140 + 160) * MIB
    assert grown.reserved.now == 160 * MIB


def test_unused_pages_of_an_expandable_segment_are_given_back() -> None:
    allocator = card(expandable=True)
    first, second = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    assert allocator.reserved.now == 60 * MIB
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved.now == 40 * MIB  # the second page holds the end of one and the start of the other
    again = allocator.malloc(30 * MIB)
    assert again.address == first.address
    assert allocator.reserved.now == 60 * MIB
    allocator.free(again)
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved.now == 0


def test_a_history_replayed_gives_the_same_peaks() -> None:
    allocator = card()
    blocks = [allocator.malloc(size * MIB) for size in (3, 30, 7, 12, 1)]
    for index in (1, 3):
        allocator.free(blocks[index])
    allocator.use(blocks[0], 5)
    allocator.malloc(25 * MIB)
    allocator.empty_cache()
    again = replay(allocator.history, 24 * GIB)
    for counter in ("allocated", "reserved", "requested"):
        assert getattr(again, counter) == getattr(allocator, counter)


def test_the_least_capacity_is_enough_and_a_byte_less_is_not() -> None:
    allocator = card()
    kept = allocator.malloc(8 * MIB)
    for size in (100, 120, 90, 130):
        allocator.free(allocator.malloc(size * MIB))
    allocator.free(kept)
    least = least_capacity(allocator.history)
    assert least == (20 + 130) * MIB < allocator.reserved.peak
    assert replay(allocator.history, least).reserved.peak == least
    with pytest.raises(CardFull):
        replay(allocator.history, least - 1)


requests = st.lists(
    st.tuples(st.integers(1, 40 * MIB), st.integers(0, 1), st.integers(0, 30), st.booleans()), max_size=60
)


@settings(max_examples=80, deadline=None)
@given(requests, st.booleans())
def test_blocks_never_overlap_and_nothing_is_lost(history: list[tuple[int, int, int, bool]], expandable: bool) -> None:
    allocator = card(300 * MIB, expandable=expandable)
    alive: list[Block] = []
    for size, stream, victim, clear in history:
        try:
            alive.append(allocator.malloc(size, stream))
        except CardFull:
            allocator.free(alive.pop(victim % len(alive)))
        if victim < len(alive) and victim % 2:
            allocator.free(alive.pop(victim))
        if clear:
            allocator.empty_cache()
        spans = sorted((block.address, block.address + block.size) for block in alive)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.allocated.now == sum(block.size for block in alive) <= allocator.reserved.now <= 300 * MIB
        assert allocator.requested.now == sum(block.requested for block in alive)
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated.now, allocator.reserved.now) == (0, 0)


def test_a_limit_counts_the_whole_request() -> None:
    """Though most of it is mapped already, and free: torch gives the cache back before it looks."""
    allocator = card(1000 * MIB, expandable=True)
    first, second = allocator.malloc(300 * MIB), allocator.malloc(300 * MIB)
    allocator.free(second)
    assert allocator.reserved.now == 600 * MIB
    allocator.malloc(480 * MIB)
    assert (allocator.retries, allocator.reserved.now) == (1, 780 * MIB)
    with pytest.raises(CardFull):
        allocator.malloc(222 * MIB)
    assert first.used


def test_pages_may_exceed_a_limit() -> None:
    allocator = card(expandable=True)
    allocator.capacity = 306 * MIB
    allocator.malloc(255 * MIB)
    assert allocator.reserved.now == 260 * MIB
    allocator.malloc(46 * MIB)  # together 306, on pages that the first did not fill
    assert (allocator.retries, allocator.reserved.now) == (0, 320 * MIB)
    with pytest.raises(CardFull):
        allocator.malloc(20 * MIB)


def test_what_is_not_mapped_is_looked_for_by_address() -> None:
    allocator = card(expandable=True)
    blocks = [allocator.malloc(size * MIB) for size in (60, 20, 40, 20)]
    for block in (blocks[0], blocks[2]):
        allocator.free(block)
    allocator.empty_cache()  # the smaller one lies higher
    assert allocator.malloc(20 * MIB).address == blocks[0].address


def test_segments_of_both_kinds() -> None:
    allocator = card()
    fixed = allocator.malloc(50 * MIB)
    allocator.expandable = True
    grown = allocator.malloc(40 * MIB)
    allocator.free(grown)
    allocator.expandable = False
    allocator.malloc(30 * MIB)
    assert allocator.reserved.now == (50 + 40 + 30) * MIB
    allocator.free(fixed)
    allocator.expandable = True
    assert allocator.malloc(30 * MIB).address == fixed.address
    assert allocator.malloc(20 * MIB - 512).address == fixed.address + 30 * MIB
    assert allocator.reserved.now == (50 + 40 + 30) * MIB


def _events_of(moves: list[int]) -> list[AllocatorEvent]:
    """Of equal sizes the oldest is freed first."""
    there: dict[int, list[int]] = {}
    events = []
    for number, size in enumerate(moves):
        if size > 0:
            there.setdefault(size, []).append(number)
            events.append(AllocatorEvent("malloc", number, size))
        else:
            events.append(AllocatorEvent("free", there[-size].pop(0)))
    return events


def _fits(history: list[AllocatorEvent], capacity: int, *, expandable: bool) -> bool:
    try:
        replay(history, capacity, expandable=expandable)
    except CardFull:
        return False
    return True


@given(
    fails=st.integers(-1, 200), least=st.integers(1, 400), guess=st.integers(0, 400),
    within=st.sampled_from([0.0, 0.01, 0.1]),
)  # fmt: skip
def test_the_lowest_that_fits_is_found_from_any_guess(fails: int, least: int, guess: int, within: float) -> None:
    unit, least, guess = 2 * MIB, max(least, fails + 1), max(guess, fails + 1)
    found = lowest_fitting(fails, guess * unit, lambda capacity: capacity >= least * unit, within)
    assert found % unit == 0
    assert least <= found // unit <= max(least, least * (1 + within))


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 2**31) | st.integers(1, 2**22), min_size=1, max_size=60),
    order=st.randoms(use_true_random=False),
    expandable=st.booleans(),
    within=st.sampled_from([0.0, 0.01]),
)
def test_what_a_trial_tells_of_other_cards_is_what_they_would_do(
    sizes: list[int], order: random.Random, expandable: bool, within: float
) -> None:
    there: list[int] = []
    moves: list[int] = []
    for size in sizes:
        there.append(size)
        moves.append(size)
        while there and order.random() < 0.45:
            moves.append(-there.pop(order.randrange(len(there))))
    history = _events_of(moves)
    trials = allocator_replay._Trial
    tells = trials.tells

    def telling(trial: allocator_replay._Trial, capacity: int) -> bool:
        found = tells(trial, capacity)
        assert not found or trial.fits == _fits(history, capacity, expandable=expandable)
        return found

    with mock.patch.object(trials, "tells", telling):
        least = least_capacity(history, expandable=expandable, within=within)
    assert _fits(history, least, expandable=expandable)
    assert least_capacity_of_moves(moves, expandable=expandable, within=within) == least


@pytest.mark.parametrize("expandable", [False, True])
def test_few_cards_are_tried_for_the_least_that_does(expandable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of what a search between two numbers would ask is known from what others did."""
    monkeypatch.setattr(allocator_replay, "EARLY", 0.0)
    tried: list[int] = []
    usual = CachingAllocator.__init__

    def counted(self: CachingAllocator, capacity: int, *args: object, **kwargs: object) -> None:
        tried.append(capacity)
        usual(self, capacity, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(CachingAllocator, "__init__", counted)
    order, there, moves = random.Random(0), list[int](), list[int]()
    for _ in range(400):
        if len(there) > 20:
            moves.append(-there.pop(order.randrange(len(there))))
        else:
            there.append(order.randrange(1, 64 * MIB))
            moves.append(there[-1])
    history, asked = _events_of(moves), list[int]()

    def asking(capacity: int) -> bool:
        asked.append(capacity)
        return _fits(history, capacity, expandable=expandable)

    least, of_them = least_capacity(history, expandable=expandable), len(tried)
    fails = rounded_peak(history) // (2 * MIB) - 1
    assert lowest_fitting(fails, (fails + 1) * 2 * MIB, asking, 0.0) == least
    assert of_them < len(asked)


@pytest.mark.parametrize("within", [0.0, 0.01])
def test_a_history_whose_peak_is_early_is_replayed_about_once(within: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the least capacity that searching all of it finds."""
    order, there, moves = random.Random(1), list[int](), list[int]()
    for place in range(8000):
        if len(there) > (30 if place < 200 else 15):
            moves.append(-there.pop(order.randrange(len(there))))
        else:
            there.append(order.randrange(1, 64 * MIB))
            moves.append(there[-1])
    replayed, usual = 0, CachingAllocator.malloc

    def counted(self: CachingAllocator, requested: int, stream: int = 0) -> Block:
        nonlocal replayed
        replayed += 1
        return usual(self, requested, stream)

    monkeypatch.setattr(CachingAllocator, "malloc", counted)
    least = least_capacity_of_moves(moves, expandable=True, within=within)
    at_once, replayed = replayed, 0
    monkeypatch.setattr(allocator_replay, "EARLY", 0.0)
    assert least_capacity_of_moves(moves, expandable=True, within=within) == least
    assert at_once < 1.5 * sum(size > 0 for size in moves) < replayed
