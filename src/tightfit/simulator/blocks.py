"""Blocks of a card's memory: parts of segments, kept in pools, with the rounded sizes of torch's allocator."""

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
    "growable_size",
    "idle_run",
    "range_size",
    "round_up",
    "rounded",
    "segment_size",
]

MIB = 2**20
QUANTUM = 512
SMALL = MIB  # bytes: the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # bytes from which a segment has the request's size, rounded up
LARGE_ROUNDING = 2 * MIB


@dataclass
class Counter:
    """A number of bytes and its peak."""

    now: int = 0
    peak: int = 0

    def add(self, difference: int) -> None:
        self.now += difference
        if self.now > self.peak:  # noqa: PLR1730 - max() takes twice as long, and this is called very often
            self.peak = self.now

    def reset_peak(self) -> None:
        self.peak = self.now

    def reach(self, above: int) -> None:
        """Raise the peak for a temporary allocation that took `above` bytes more."""
        self.peak = max(self.peak, self.now + above)


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: in use, free, or (in an expandable segment) unmapped. Address and sizes are in bytes."""

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
    streams: frozenset[int] = frozenset()  # other streams that used it
    awaited: int = 0  # number of events that must be reached before it is free
    made: int = field(default_factory=itertools.count().__next__)  # creation number: lower is older

    @property
    def idle(self) -> bool:
        return not self.used and not self.awaited and not self.streams

    @property
    def whole(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None

    def split(self, size: int) -> None:
        """Shrink it to `size` bytes; it counts as new, and the free remainder has the age that it had."""
        rest = Block(self.address + size, self.size - size, self.stream, self.pool, expandable=self.expandable)
        rest.made, self.made = self.made, rest.made
        join(rest, self.after)
        join(self, rest)
        self.size = size
        self.pool.insert(rest)

    def merge_neighbours(self) -> None:
        """Merge idle neighbours into it, while it is in no pool."""
        before, after = self.before, self.after
        if before is not None and not before.used and before.idle and before.mapped == self.mapped:
            self.pool.remove(before)
            self.size += before.size
            self.address = before.address
            join(before.before, self)
        if after is not None and not after.used and after.idle and after.mapped == self.mapped:
            self.pool.remove(after)
            self.size += after.size
            join(self, after.after)


Entry = tuple[int, int, int, Block]  # the unique sort key of a free block, and the block


@dataclass(eq=False)
class Pool:
    """Free blocks for small or for large requests, ordered by size; unmapped blocks, ordered by address alone.

    Blocks of equal size are ordered by address, or with `oldest_first` by creation.
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
        """Index in `free` of the first block of `stream` with at least `size` bytes."""
        return bisect_left(self.free, (stream, size, -1))

    def holes(self, stream: int) -> Iterator[Block]:
        """Yield the unmapped blocks in the segments of `stream`, by rising address."""
        for entry in itertools.islice(self.unmapped, bisect_left(self.unmapped, (stream, 0)), None):
            if entry[0] != stream:
                return
            yield entry[2]

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


def rounded(size: int) -> int:
    """Bytes of the block for a request of `size` bytes."""
    return -(-size // QUANTUM) * QUANTUM or QUANTUM


def segment_size(size: int) -> int:
    """Bytes of the segment that is reserved for a block of `size` bytes where none is free."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return round_up(size, LARGE_ROUNDING)


def range_size(total: int, page: int) -> int:
    """Bytes of the address range of an expandable segment on a card of `total` bytes."""
    return round_up(total + total // 8, page)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def growable_size(block: Block) -> int:
    """Bytes that `block` can grow to, with the unmapped block after it; the best-fit search compares these."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def idle_run(block: Block | None, enough: int) -> int:
    """Contiguous idle bytes from the start of `block` on, mapped or not, counted until `enough` is reached."""
    size = 0
    while size < enough and block is not None and block.idle:
        size += block.size
        block = block.after
    return size


def chain(first: Block | None, second: Block | None, third: Block | None) -> None:
    """Link three blocks as neighbours, in this order."""
    join(first, second)
    join(second, third)


def join(left: Block | None, right: Block | None) -> None:
    """Link two blocks as neighbours."""
    if left is not None:
        left.after = right
    if right is not None:
        right.before = left
