"""The ring: whatever is taken and given back, no two leases share bytes, and nobody writes before others have read."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.plan.prefetch import ALIGNMENT, Lease, Ring

PAGES = st.integers(1, 12)
SIZES = st.integers(1, 4) | PAGES


class Model:
    """A ring with what it does not keep itself: who has which pages, and the mark of the last work on each."""

    def __init__(self, pages: int) -> None:
        self.ring = Ring(pages * ALIGNMENT)
        self.held: deque[Lease] = deque()  # the oldest first
        self.marks = [0] * pages
        self.clock = 0

    def take(self, pages: int) -> Lease | None:
        """Takes from the ring, and checks that what comes is free and waits for all that was there before."""
        lease = self.ring.take(pages * ALIGNMENT)
        if lease is None:
            return None
        assert lease.size == pages * ALIGNMENT
        assert lease.offset % ALIGNMENT == 0
        assert 0 <= lease.offset <= self.ring.size - lease.size
        for other in self.held:
            assert lease.offset + lease.size <= other.offset or other.offset + other.size <= lease.offset
        assert (lease.after or 0) >= max(self.marks[page] for page in self.pages(lease))
        self.held.append(lease)
        return lease

    def give_back(self, index: int) -> Lease:
        lease = self.held[index]
        del self.held[index]
        self.clock += 1
        for page in self.pages(lease):
            self.marks[page] = self.clock
        self.ring.give_back(lease, self.clock)
        return lease

    @staticmethod
    def pages(lease: Lease) -> range:
        return range(lease.offset // ALIGNMENT, (lease.offset + lease.size) // ALIGNMENT)


@settings(deadline=None)
@given(pages=PAGES, moves=st.lists(st.none() | SIZES, max_size=60))
def test_in_turn_leases_never_meet_and_wait_for_what_was_there(pages: int, moves: list[int | None]) -> None:
    model = Model(pages)
    for size in moves:
        if size is not None:
            model.take(size)
        elif model.held:
            model.give_back(0)


@settings(deadline=None)
@given(pages=PAGES, moves=st.lists(st.tuples(st.booleans(), PAGES), max_size=60))
def test_in_any_order_leases_never_meet_and_wait_for_what_was_there(pages: int, moves: list[tuple[bool, int]]) -> None:
    model = Model(pages)
    for takes, number in moves:
        if takes:
            model.take(number)
        elif model.held:
            model.give_back(number % len(model.held))


@settings(deadline=None)
@given(pages=PAGES, moves=st.lists(st.none() | SIZES, max_size=60))
def test_what_the_oldest_gives_back_can_be_taken_again(pages: int, moves: list[int | None]) -> None:
    model = Model(pages)
    for size in moves:
        if size is not None:
            model.take(size)
        elif model.held:
            lease = model.give_back(0)
            assert model.take(lease.size // ALIGNMENT) is not None


@settings(deadline=None)
@given(pages=PAGES, moves=st.lists(st.none() | SIZES, max_size=40), order=st.randoms(use_true_random=False))
def test_whatever_has_happened_all_of_it_can_be_taken_when_all_came_back(pages: int, moves, order) -> None:
    model = Model(pages)
    for size in moves:
        if size is not None:
            model.take(size)
        elif model.held:
            model.give_back(0)
    while model.held:
        model.give_back(order.randrange(len(model.held)))
    assert model.take(pages) is not None
    assert model.take(1) is None


@settings(deadline=None)
@given(pages=PAGES, passes=st.integers(1, 4))
def test_every_byte_is_of_use(pages: int, passes: int) -> None:
    model = Model(pages)
    for _ in range(passes):
        offsets = [lease.offset for _ in range(pages) if (lease := model.take(1))]
        assert offsets == [page * ALIGNMENT for page in range(pages)]
        assert model.take(1) is None
        for _ in range(pages):
            model.give_back(0)


@pytest.mark.parametrize(("size", "taken"), [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (9000, 12288)])
def test_sizes_are_whole_pages(size: int, taken: int) -> None:
    ring = Ring(16384)
    first, second = ring.take(size), ring.take(1)
    assert first is not None
    assert second is not None
    assert (first.offset, first.size) == (0, taken)
    assert (second.offset, second.size) == (taken, 4096)


def test_pages_that_would_be_partly_outside_are_not_lent() -> None:
    ring = Ring(2 * 4096 + 4095)
    assert ring.take(2 * 4096 + 1) is None
    assert ring.take(2 * 4096) is not None
    assert ring.take(1) is None


@pytest.mark.parametrize("size", [1, 4096, 10**9])
def test_a_ring_without_bytes_lends_nothing(size: int) -> None:
    assert Ring(0).take(size) is None


def test_nothing_larger_than_the_ring_is_lent_even_when_all_came_back() -> None:
    ring = Ring(8192)
    lease = ring.take(8192)
    assert lease is not None
    ring.give_back(lease, 1)
    assert ring.take(8193) is None
    assert ring.take(8192) is not None


def test_the_first_leases_wait_for_nobody() -> None:
    ring = Ring(8192)
    leases = [ring.take(4096), ring.take(4096)]
    assert [lease.after for lease in leases if lease] == [None, None]


def test_a_lease_waits_for_the_work_on_what_was_there_before() -> None:
    ring = Ring(8192)
    first, second = ring.take(4096), ring.take(4096)
    assert first is not None
    assert second is not None
    ring.give_back(first, "first")
    ring.give_back(second, "second")
    third, fourth = ring.take(4096), ring.take(4096)
    assert third is not None
    assert fourth is not None
    assert (third.offset, third.after) == (0, "first")
    assert (fourth.offset, fourth.after) == (4096, "second")


def test_what_came_back_too_early_waits_for_what_is_older() -> None:
    ring = Ring(8192)
    first, second = ring.take(4096), ring.take(4096)
    assert first is not None
    assert second is not None
    ring.give_back(second, 1)
    assert ring.take(4096) is None
    ring.give_back(first, 2)
    whole = ring.take(8192)
    assert whole is not None
    assert whole.after == 2  # the later of both, although it is of the older lease


def test_what_does_not_fit_behind_the_newest_goes_to_the_front() -> None:
    ring = Ring(5 * 4096)
    first, second = ring.take(2 * 4096), ring.take(2 * 4096)
    assert first is not None
    assert second is not None
    assert ring.take(2 * 4096) is None  # one page is left behind, none before
    ring.give_back(first, 1)
    third = ring.take(2 * 4096)
    assert third is not None
    assert third.offset == 0
    assert ring.take(4096) is None  # between the newest and the oldest is nothing; behind both is what was passed over
    ring.give_back(second, 2)
    fourth = ring.take(3 * 4096)
    assert fourth is not None
    assert fourth.offset == 2 * 4096


def test_what_is_left_between_the_newest_and_the_oldest_is_of_use_to_the_last_byte() -> None:
    ring = Ring(3 * 4096)
    leases = [ring.take(4096) for _ in range(3)]
    assert leases[0] is not None
    assert leases[1] is not None
    ring.give_back(leases[0], 1)
    ring.give_back(leases[1], 2)
    assert [lease.offset for _ in range(2) if (lease := ring.take(4096))] == [0, 4096]
    assert ring.take(1) is None
