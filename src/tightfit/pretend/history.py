"""What was asked of an allocator, asked again: of a card of another size, and of the smallest that will do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from tightfit.pretend.allocator import CachingAllocator, CardFull, Step
from tightfit.pretend.blocks import LARGE_ROUNDING, Block, rounded, segment_size

__all__ = ["least_capacity", "replay", "steps_of"]


class _Passed:
    """An event that is over when it is recorded."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


def replay(history: Iterable[Step], capacity: int, *, expandable: bool = False) -> CachingAllocator:
    """The allocator of a card with `capacity` bytes after `history`; CardFull where that did not fit.

    Streams are taken to have done their work whenever a block that they used is given up.
    """
    allocator = CachingAllocator(capacity, lambda stream: _Passed(), expandable=expandable)
    blocks: dict[int, Block] = {}
    for step in history:
        match step.what:
            case "malloc":
                blocks[step.block] = allocator.malloc(step.size, step.stream)
            case "free":
                allocator.free(blocks.pop(step.block))
            case "use":
                allocator.use(blocks[step.block], step.stream)
            case "empty_cache":
                allocator.empty_cache()
    return allocator


def steps_of(moves: Iterable[int]) -> Iterator[Step]:
    """What is asked of an allocator where bytes are taken and (below zero) given back, the oldest of a size first."""
    there: dict[int, deque[int]] = {}
    for number, size in enumerate(moves):
        if size > 0:
            there.setdefault(size, deque()).append(number)
            yield Step("malloc", number, size)
        elif there.get(-size):
            yield Step("free", there[-size].popleft())


def least_capacity(history: Sequence[Step], *, expandable: bool = False, within: float = 0.0) -> int:
    """The bytes that a card must have for `history` to fit, caches given back where that helps; a multiple of 2 MiB.

    `within` is by how much it may be more, as a share of it.
    """
    roomy = replay(history, 2**60, expandable=expandable)
    largest = max((segment_size(rounded(step.size)) for step in history if step.what == "malloc"), default=0)
    enough = roomy.reserved.peak + (largest if expandable else 0)  # whatever is asked for, nobody looks at the limit
    fits, fails = enough // LARGE_ROUNDING, roomy.allocated.peak // LARGE_ROUNDING - 1
    while fits - fails > max(1, within * fits):
        middle = (fits + fails) // 2
        try:
            replay(history, middle * LARGE_ROUNDING, expandable=expandable)
            fits = middle
        except CardFull:
            fails = middle
    return fits * LARGE_ROUNDING
