"""What was asked of an allocator, asked again: of a card of another size, and of the smallest that will do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from tightfit.simulator.allocator import AllocatorEvent, CachingAllocator, CardFull
from tightfit.simulator.blocks import LARGE_ROUNDING, Block, Counter, range_size, room, rounded, segment_size

__all__ = ["allocator_events_of", "least_capacity", "replay", "rounded_peak"]


class _Passed:
    """An event that is over when it is recorded."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


def replay(history: Iterable[AllocatorEvent], capacity: int, *, expandable: bool = False) -> CachingAllocator:
    """The allocator of a card with `capacity` bytes after `history`; CardFull where that did not fit.

    Streams are taken to have done their work whenever a block that they used is given up.
    """
    allocator = CachingAllocator(capacity, _passed, expandable=expandable)
    _ask(allocator, history)
    return allocator


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
    """An allocator that knows on which other cards it would have done the same, step by step.

    What a card's size decides: whether so much may be reserved, and how long ranges of addresses are. Where nothing
    but the end of a range could be in the way of a choice, the range was long enough for it by `spare` bytes.
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
        """Whether a card with `capacity` bytes would have done the same."""
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
        one, two = room(block), room(other)
        reaches = _reaches_end(block)
        if reaches != _reaches_end(other):
            self._spare = min(self._spare, one - two if reaches else two - one - 1)
        return one >= two

    def _fits_behind(self, block: Block, size: int) -> bool:
        before, last = 0, block
        while before < size and last.idle and last.after is not None:
            before, last = before + last.size, last.after
        if before < size and last.idle:  # up to the end of the range
            self._spare = min(self._spare, before + last.size - size - block.pool.page)
        return super()._fits_behind(block, size)


def _reaches_end(block: Block) -> bool:
    """Whether `block` could grow to the end of its range of addresses."""
    return block.after is not None and not block.after.mapped and block.after.after is None


def rounded_peak(history: Iterable[AllocatorEvent]) -> int:
    """The most bytes that blocks have together if each is as small as its request allows."""
    there, now = dict[int, int](), Counter()
    for what, block, size, _ in history:
        if what == "malloc":
            there[block] = rounded(size)
            now.add(there[block])
        elif what == "free":
            now.add(-there.pop(block))
    return now.peak


def allocator_events_of(moves: Iterable[int]) -> Iterator[AllocatorEvent]:
    """What is asked of an allocator where bytes are taken and (below zero) given back, the oldest of a size first."""
    there: dict[int, deque[int]] = {}
    for number, size in enumerate(moves):
        if size > 0:
            there.setdefault(size, deque()).append(number)
            yield AllocatorEvent("malloc", number, size)
        elif there.get(-size):
            yield AllocatorEvent("free", there[-size].popleft())


def least_capacity(history: Sequence[AllocatorEvent], *, expandable: bool = False, within: float = 0.0) -> int:
    """The bytes that a card must have for `history` to fit, caches given back where that helps; a multiple of 2 MiB.

    `within` is by how much it may be more, as a share of it.
    """
    roomy = _Trial(history, 2**60, expandable=expandable)
    largest = max((segment_size(rounded(step.size)) for step in history if step.what == "malloc"), default=0)
    enough = roomy.reserved.peak + (largest if expandable else 0)  # whatever is asked for, nobody looks at the limit
    fits, fails = enough // LARGE_ROUNDING, roomy.allocated.peak // LARGE_ROUNDING - 1
    trials = [roomy]
    while fits - fails > max(1, within * fits):
        middle = (fits + fails) // 2
        capacity = middle * LARGE_ROUNDING
        known = next((trial for trial in trials if trial.tells(capacity)), None)
        if known is None:
            trials.append(known := _Trial(history, capacity, expandable=expandable))
        if known.fits:
            fits = middle
        else:
            fails = middle
    return fits * LARGE_ROUNDING
