"""Replays an allocator's history on a card of another size, and finds the smallest size on which it fits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from tightfit.simulator.allocator import AllocatorEvent, CachingAllocator, CardFull
from tightfit.simulator.blocks import LARGE_ROUNDING, Block, Counter, growable_size, range_size, rounded

__all__ = ["ROUGH", "allocator_events_of", "least_capacity", "replay", "reserved_for", "rounded_peak"]

ROUGH = 0.01  # relative excess over the smallest capacity with which finding it takes less than half of the time


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


class _Trial(CachingAllocator):
    """An allocator that tracks for which other capacities it would have made the same decisions.

    The capacity decides whether bytes may be reserved, and how long address ranges are. Where a decision could change
    only because of the end of a range, the range was long enough for it by `spare` bytes.
    """

    def __init__(self, history: Iterable[AllocatorEvent], capacity: int, *, expandable: bool) -> None:
        super().__init__(capacity, _passed, expandable=expandable, keep=False)
        self._least, self._below, self._spare = 0, math.inf, math.inf
        try:
            _ask(self, history)
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
    there, now = dict[int, int](), Counter()
    for what, block, size, _ in history:
        if what == "malloc":
            there[block] = rounded(size)
            now.add(there[block])
        elif what == "free":
            now.add(-there.pop(block))
    return now.peak


def allocator_events_of(moves: Iterable[int]) -> Iterator[AllocatorEvent]:
    """Allocator events of `moves`, bytes allocated or (negative) freed; of equal sizes the oldest is freed first."""
    there: dict[int, deque[int]] = {}
    for number, size in enumerate(moves):
        if size > 0:
            there.setdefault(size, deque()).append(number)
            yield AllocatorEvent("malloc", number, size)
        elif there.get(-size):
            yield AllocatorEvent("free", there[-size].popleft())


def least_capacity(history: Sequence[AllocatorEvent], *, expandable: bool = False, within: float = 0.0) -> int:
    """Smallest capacity in bytes on which `history` fits, with caches released where needed; a multiple of 2 MiB.

    `within` is the allowed relative excess over the smallest capacity. Capacities are tried from the least that could
    do upwards, in steps that double, and then between the last two: most histories need little more than the least.
    """
    fails = rounded_peak(history) // LARGE_ROUNDING - 1
    fits, step, trials = math.inf, max(1, int(within * fails)), list[_Trial]()
    while fits - fails > max(1, within * fails):
        tried = fails + step if fits == math.inf else int(fits + fails) // 2
        capacity = tried * LARGE_ROUNDING
        known = next((trial for trial in trials if trial.tells(capacity)), None)
        if known is None:
            trials.append(known := _Trial(history, capacity, expandable=expandable))
        if known.fits:
            fits = tried
        else:
            fails, step = tried, 2 * step
    return int(fits) * LARGE_ROUNDING
