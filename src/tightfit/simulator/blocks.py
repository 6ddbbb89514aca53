"""Blocks of a card's memory: stretches of segments, kept in pools, in the sizes that torch's allocator gives them."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = [
    "LARGE_ROUNDING",
    "QUANTUM",
    "SMALL",
    "Block",
    "Counter",
    "Pool",
    "chain",
    "idle_run",
    "join",
    "range_size",
    "room",
    "rounded",
    "segment_size",
    "up",
]

MIB = 2**20
QUANTUM = 512
SMALL = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # from here on, segments are made to measure
LARGE_ROUNDING = 2 * MIB


@dataclass
class Counter:
    """A number of bytes and the most it has been."""

    now: int = 0
    peak: int = 0

    def add(self, difference: int) -> None:
        self.now += difference
        if self.now > self.peak:  # noqa: PLR1730 - max() takes twice as long, and this is called all the time
            self.peak = self.now

    def reset_peak(self) -> None:
        self.peak = self.now

    def reach(self, above: int) -> None:
        """Something came and went that took `above` bytes at its most."""
        self.peak = max(self.peak, self.now + above)


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) not mapped."""

    address: int
    size: int
    stream: int
    pool: Pool
    number: int = 0
    requested: int = 0
    used: bool = False
    mapped: bool = True
    expandable: bool = False
    before: Block | None = None
    after: Block | None = None
    streams: frozenset[int] = frozenset()  # others that used it
    awaited: int = 0  # events that must pass before it is free
    made: int = field(default_factory=itertools.count().__next__)  # the less, the older

    @property
    def idle(self) -> bool:
        return not self.used and not self.awaited and not self.streams

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.before is None and self.after is None


Entry = tuple[int, int, int, Block]  # a free block, after what it is ordered by: no two share that


@dataclass(eq=False)
class Pool:
    """Free blocks for small or for large requests, ordered by size; what is not mapped, by address alone.

    Of one size, the first is the one with the lowest address, or with `oldest_first` the one that was made first.
    """

    small: bool
    oldest_first: bool = False
    free: list[Entry] = field(default_factory=list)
    unmapped: list[tuple[int, int, Block]] = field(default_factory=list)

    def insert(self, block: Block) -> None:
        if block.mapped:
            at = block.made if self.oldest_first else block.address
            insort(self.free, (block.stream, block.size, at, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            at = block.made if self.oldest_first else block.address
            del self.free[bisect_left(self.free, (block.stream, block.size, at))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]

    def first_fitting(self, size: int, stream: int) -> int:
        """Where in `free` those of `stream` with at least `size` bytes begin."""
        return bisect_left(self.free, (stream, size, -1))

    def holes(self, stream: int) -> Iterator[Block]:
        """What is not mapped in the segments of `stream`, the lowest address first."""
        for entry in itertools.islice(self.unmapped, bisect_left(self.unmapped, (stream, 0)), None):
            if entry[0] != stream:
                return
            yield entry[2]

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


def rounded(size: int) -> int:
    """Bytes of a block for a request of `size`."""
    return -(-size // QUANTUM) * QUANTUM or QUANTUM


def segment_size(size: int) -> int:
    """Bytes of the segment that is reserved for a block of `size` where none is free."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return up(size, LARGE_ROUNDING)


def range_size(total: int, page: int) -> int:
    """Bytes of addresses that an expandable segment has on a card of `total` bytes."""
    return up(total + total // 8, page)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def room(block: Block) -> int:
    """What `block` could grow to: it counts as that large when the best fit is looked for."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def idle_run(block: Block | None, enough: int) -> int:
    """Bytes in a row from `block` on that nothing uses, mapped or not, up to `enough`."""
    size = 0
    while size < enough and block is not None and block.idle:
        size += block.size
        block = block.after
    return size


def chain(first: Block | None, second: Block | None, third: Block | None) -> None:
    """Makes three blocks neighbours, in this order."""
    join(first, second)
    join(second, third)


def join(left: Block | None, right: Block | None) -> None:
    """Makes two blocks neighbours."""
    if left is not None:
        left.after = right
    if right is not None:
        right.before = left
