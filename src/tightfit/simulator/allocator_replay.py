"""Replays an allocator's history on a card of another size, and finds the smallest size on which it fits."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.simulator.allocator import AllocatorEvent, CachingAllocator, CardFull
from tightfit.simulator.blocks import (
    LARGE_ROUNDING,
    Block,
    Counter,
    growable_size,
    range_size,
    round_up,
    rounded,
    segment_size,
)

__all__ = [
    "ROUGH",
    "CapacitySearch",
    "least_capacity",
    "least_capacity_of_moves",
    "lowest_fitting",
    "replay",
    "reserved_for",
    "rounded_peak",
    "search_of_moves",
]

ROUGH = 0.01  # relative excess over the smallest capacity where finding that is not worth the time


class _Passed:
    """An event that is complete when it is recorded."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


def replay(history: Iterable[AllocatorEvent], capacity: int, *, expandable: bool = False) -> CachingAllocator:
    """Return the allocator of a card with `capacity` bytes after `history`; CardFull where it does not fit.

    Streams are assumed to have finished their work whenever a block that they used is freed.
    """
    allocator = CachingAllocator(capacity, _passed, expandable=expandable)
    _ask(allocator, history)
    return allocator


def reserved_for(sizes: Iterable[int]) -> int:
    """Bytes that an allocator with expandable segments reserves for blocks of these sizes, allocated one by one."""
    requests = [AllocatorEvent("malloc", number, size) for number, size in enumerate(sizes)]
    return replay(requests, 2**60, expandable=True).reserved.peak


def _passed(stream: int) -> _Passed:
    return _Passed()


def _ask(allocator: CachingAllocator, history: Iterable[AllocatorEvent]) -> None:
    blocks: dict[int, Block] = {}
    for what, block, size, stream in history:
        match what:
            case "malloc":
                blocks[block] = allocator.malloc(size, stream)
            case "free":
                allocator.free(blocks.pop(block))
            case "use":
                allocator.use(blocks[block], stream)
            case "empty_cache":
                allocator.empty_cache()


def _ask_moves(allocator: CachingAllocator, moves: Iterable[int]) -> None:
    there: defaultdict[int, deque[Block]] = defaultdict(deque)
    malloc, free = allocator.malloc, allocator.free
    for size in moves:
        if size > 0:
            there[size].append(malloc(size))
        elif blocks := there[-size]:
            free(blocks.popleft())


class _Growing(CachingAllocator):
    """An allocator of a card that gets as much more memory as a request lacks."""

    def malloc(self, requested: int, stream: int = 0) -> Block:
        try:
            return super().malloc(requested, stream)
        except CardFull as full:
            needed = round_up(full.reserved + segment_size(rounded(requested)), LARGE_ROUNDING)
            self.capacity = self._total = max(needed, self.capacity + LARGE_ROUNDING)
            return self.malloc(requested, stream)


class _Replayed(NamedTuple):
    """What a replay on a card of `capacity` bytes told."""

    capacity: int
    fits: bool
    least: int  # for any capacity from here on, …
    below: float  # … and below this, it would have reserved bytes as it did
    spare: float  # bytes by which address ranges were longer than a decision needed
    pages: tuple[int, ...]  # of its pools; none if address ranges do not depend on the capacity

    def tells(self, capacity: int) -> bool:
        """Whether a card with `capacity` bytes would have made the same decisions."""
        if capacity == self.capacity:
            return True
        if not self.least <= capacity < self.below:
            return False
        shorter = (range_size(self.capacity, page) - range_size(capacity, page) for page in self.pages)
        return not self.pages or (self.spare >= 0 and max(shorter) <= self.spare)


class _Trial(CachingAllocator):
    """An allocator that tracks for which other capacities it would have made the same decisions.

    The capacity decides whether bytes may be reserved, and how long address ranges are. Where a decision could change
    only because of the end of a range, the range was long enough for it by `spare` bytes.
    """

    def __init__(self, capacity: int, *, expandable: bool) -> None:
        super().__init__(capacity, _passed, expandable=expandable, keep=False)
        self._least, self._below, self._spare = 0, math.inf, math.inf

    def outcome(self, play: Callable[[CachingAllocator], None]) -> _Replayed:
        """Replay what `play` asks for."""
        try:
            play(self)
            fits = True
        except CardFull:
            fits = False
        pages = tuple(pool.page for pool in self._pools.values()) if self.expandable else ()
        return _Replayed(self.capacity, fits, self._least, self._below, self._spare, pages)

    def _has(self, length: int, most: int) -> bool:
        needed = self.reserved.now + length
        if needed <= most:
            self._least = max(self._least, needed)
            return True
        self._below = min(self._below, needed)
        return False

    def _is_roomier(self, block: Block, other: Block) -> bool:
        one, two = growable_size(block), growable_size(other)
        reaches = _reaches_end(block)
        if reaches != _reaches_end(other):
            self._spare = min(self._spare, one - two if reaches else two - one - 1)
        return one >= two

    def _fits_behind(self, block: Block, size: int) -> bool:
        before, last = 0, block
        while before < size and last.idle and last.after is not None:
            before, last = before + last.size, last.after
        if before < size and last.idle:  # reaches the end of the range
            self._spare = min(self._spare, before + last.size - size - block.pool.page)
        return super()._fits_behind(block, size)


def _reaches_end(block: Block) -> bool:
    """Whether `block` could grow to the end of its address range."""
    return block.after is not None and not block.after.mapped and block.after.after is None


def rounded_peak(history: Iterable[AllocatorEvent]) -> int:
    """Peak bytes of all blocks together if each has the rounded size of its request."""
    there, now = dict[int, int](), Counter()
    for what, block, size, _ in history:
        if what == "malloc":
            there[block] = rounded(size)
            now.add(there[block])
        elif what == "free":
            now.add(-there.pop(block))
    return now.peak


def least_capacity(history: Sequence[AllocatorEvent], *, expandable: bool = False, within: float = 0.0) -> int:
    """Smallest capacity in bytes on which `history` fits, with caches released where needed; a multiple of 2 MiB.

    `within` is the allowed relative excess over the smallest capacity.
    """
    play = functools.partial(_ask, history=history)
    return CapacitySearch.begun(play, rounded_peak(history), expandable=expandable, within=within).least()


def search_of_moves(moves: Sequence[int], *, expandable: bool = False, within: float = 0.0) -> CapacitySearch:
    """Begin to search for the `least_capacity` of bytes allocated or (negative) freed.

    Of equal sizes the oldest is freed first.
    """
    there = itertools.accumulate(rounded(size) if size > 0 else -rounded(-size) for size in moves)
    play = functools.partial(_ask_moves, moves=moves)
    return CapacitySearch.begun(play, max(there, default=0), expandable=expandable, within=within)


def least_capacity_of_moves(moves: Sequence[int], *, expandable: bool = False, within: float = 0.0) -> int:
    """Return what `search_of_moves` finds."""
    return search_of_moves(moves, expandable=expandable, within=within).least()


def _later(job: Callable[[], _Replayed]) -> Callable[[], _Replayed]:
    return job


@dataclass(frozen=True)
class CapacitySearch:
    """A search for the smallest capacity that does for what `play` asks of an allocator; another process may end it."""

    play: Callable[[CachingAllocator], None]
    expandable: bool
    within: float  # allowed relative excess
    fails: int  # multiple of 2 MiB that does not do
    guess: int  # capacity in bytes of a card that grew with what it was asked for
    found: bool  # whether nothing is smaller than `guess`

    @classmethod
    def begun(
        cls, play: Callable[[CachingAllocator], None], peak: int, *, expandable: bool, within: float
    ) -> CapacitySearch:
        """Return the search with a guess; `peak` is that of all blocks together."""
        fails = peak // LARGE_ROUNDING - 1
        first = (fails + max(1, int(within * fails))) * LARGE_ROUNDING
        play(growing := _Growing(first, _passed, expandable=expandable, keep=False))
        return cls(play, expandable, within, fails, growing.capacity, growing.capacity == first)

    def least(self, begin: Callable[[Callable[[], _Replayed]], Callable[[], _Replayed]] = _later) -> int:
        """Return the smallest capacity in bytes, a multiple of 2 MiB.

        `begin` may begin a replay in another process that is likely to be needed, and returns how to get its result.
        """
        if self.found:
            return self.guess
        below = _just_below(self.guess // LARGE_ROUNDING, self.within) * LARGE_ROUNDING
        of_below = begin(functools.partial(self._replay_on, below))
        outcomes: list[_Replayed] = []

        def fits(capacity: int) -> bool:
            known = next((outcome for outcome in outcomes if outcome.tells(capacity)), None)
            if known is None:
                known = of_below() if capacity == below else self._replay_on(capacity)
                outcomes.append(known)
            return known.fits

        return lowest_fitting(self.fails, self.guess, fits, self.within)

    def _replay_on(self, capacity: int) -> _Replayed:
        return _Trial(capacity, expandable=self.expandable).outcome(self.play)


def lowest_fitting(fails: int, guess: int, fits: Callable[[int], bool], within: float) -> int:
    """Return the smallest capacity for which `fits` is true, a multiple of 2 MiB; with `fails` times that it is not.

    First upwards from a `guess`, in steps that double; then just so much below the first that fits that the search ends
    if that fails; then the halves between two.
    """
    most, step = guess // LARGE_ROUNDING, max(1, int(within * fails))
    while not fits(most * LARGE_ROUNDING):
        fails, most, step = most, most + step, 2 * step
    tried = _just_below(most, within)
    while most - fails > max(1, within * fails):
        if fits(tried * LARGE_ROUNDING):
            most = tried
        else:
            fails = tried
        tried = (most + fails) // 2
    return most * LARGE_ROUNDING


def _just_below(most: int, within: float) -> int:
    """So much below `most` that a search ends if it fails."""
    return most - max(1, int(within * most / (1 + within)))
