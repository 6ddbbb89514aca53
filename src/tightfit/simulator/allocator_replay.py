"""Replays an allocator's history on a card of another size, and finds the smallest size on which it fits."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tightfit.simulator.allocator import AllocatorEvent, CachingAllocator, CardFull
from tightfit.simulator.blocks import (
    LARGE_ROUNDING,
    Block,
    growable_size,
    range_size,
    round_up,
    rounded,
    segment_size,
)

__all__ = [
    "ROUGH",
    "least_capacity",
    "least_capacity_of_moves",
    "lowest_fitting",
    "replay",
    "reserved_for",
    "rounded_peak",
]

ROUGH = 0.01  # relative excess over the smallest capacity where finding that is not worth the time
EARLY = 0.25  # share of a history, up to its peak, that is searched before the whole is

T = TypeVar("T")

Ask = Callable[[CachingAllocator, Sequence[T]], None]  # repeats requests to an allocator


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


def _ask_moves(allocator: CachingAllocator, history: Iterable[int]) -> None:
    there: defaultdict[int, deque[Block]] = defaultdict(deque)
    malloc, free = allocator.malloc, allocator.free
    for size in history:
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


class _Trial(CachingAllocator):
    """An allocator that tracks for which other capacities it would have made the same decisions.

    The capacity decides whether bytes may be reserved, and how long address ranges are. Where a decision could change
    only because of the end of a range, the range was long enough for it by `spare` bytes.
    """

    def __init__(self, ask: Ask[T], requests: Sequence[T], capacity: int, *, expandable: bool) -> None:
        super().__init__(capacity, _passed, expandable=expandable, keep=False)
        self._least, self._below, self._spare = 0, math.inf, math.inf
        try:
            ask(self, requests)
            self.fits = True
        except CardFull:
            self.fits = False

    def tells(self, capacity: int) -> bool:
        """Whether a card with `capacity` bytes would have made the same decisions."""
        if capacity == self.capacity:
            return True
        if not self._least <= capacity < self._below:
            return False
        shorter = (
            range_size(self.capacity, pool.page) - range_size(capacity, pool.page) for pool in self._pools.values()
        )
        return not self.expandable or (self._spare >= 0 and max(shorter) <= self._spare)

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
    return max(_bytes_together(history), default=0)


def _bytes_together(history: Iterable[AllocatorEvent]) -> Iterator[int]:
    """Yield the bytes of all blocks together after each event."""
    there, now = dict[int, int](), 0
    for what, block, size, _ in history:
        if what == "malloc":
            there[block] = rounded(size)
            now += there[block]
        elif what == "free":
            now -= there.pop(block)
        yield now


def least_capacity(history: Sequence[AllocatorEvent], *, expandable: bool = False, within: float = 0.0) -> int:
    """Smallest capacity in bytes on which `history` fits, with caches released where needed; a multiple of 2 MiB.

    `within` is the allowed relative excess over the smallest capacity.
    """
    return _least_capacity(_ask, history, _bytes_together(history), expandable, within)


def least_capacity_of_moves(moves: Sequence[int], *, expandable: bool = False, within: float = 0.0) -> int:
    """As `least_capacity`, of bytes allocated or (negative) freed; of equal sizes the oldest is freed first."""
    together = itertools.accumulate(rounded(size) if size > 0 else -rounded(-size) for size in moves)
    return _least_capacity(_ask_moves, moves, together, expandable, within)


def _least_capacity(
    ask: Ask[T],
    requests: Sequence[T],
    together: Iterable[int],
    expandable: bool,
    within: float,
) -> int:
    """Smallest capacity on which `requests` fit, after each of which blocks have so many bytes `together`.

    Where the peak is early, what does for the requests up to it, and some after it, usually does for all of them.
    """
    place, peak = max(enumerate(together), key=operator.itemgetter(1), default=(0, 0))
    length = place + 1
    while length <= EARLY * len(requests):
        least = _least_for(ask, requests[:length], peak, expandable, within)
        if _Trial(ask, requests, least, expandable=expandable).fits:
            return least
        length *= 4
    return _least_for(ask, requests, peak, expandable, within)


def _least_for(ask: Ask[T], requests: Sequence[T], peak: int, expandable: bool, within: float) -> int:
    trials: list[_Trial] = []

    def fits(capacity: int) -> bool:
        known = next((trial for trial in trials if trial.tells(capacity)), None)
        if known is None:
            trials.append(known := _Trial(ask, requests, capacity, expandable=expandable))
        return known.fits

    fails = peak // LARGE_ROUNDING - 1
    first = (fails + max(1, int(within * fails))) * LARGE_ROUNDING
    ask(growing := _Growing(first, _passed, expandable=expandable, keep=False), requests)
    return first if growing.capacity == first else lowest_fitting(fails, growing.capacity, fits, within)


def lowest_fitting(fails: int, guess: int, fits: Callable[[int], bool], within: float) -> int:
    """Return the smallest capacity for which `fits` is true, a multiple of 2 MiB; with `fails` times that it is not.

    First upwards from a `guess`, in steps that double; then just so much below the first that fits that the search ends
    if that fails; then the halves between two.
    """
    most, step = guess // LARGE_ROUNDING, max(1, int(within * fails))
    while not fits(most * LARGE_ROUNDING):
        fails, most, step = most, most + step, 2 * step
    tried = most - max(1, int(within * most / (1 + within)))
    while most - fails > max(1, within * fails):
        if fits(tried * LARGE_ROUNDING):
            most = tried
        else:
            fails = tried
        tried = (most + fails) // 2
    return most * LARGE_ROUNDING
