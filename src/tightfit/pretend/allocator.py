"""What torch's CUDA caching allocator would do: blocks, segments, and when there is not enough.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) with its default settings. Sizes are
rounded to 512 bytes. Up to 1 MiB comes from 2 MiB segments, up to 10 MiB from 20 MiB segments, more from segments
rounded up to 2 MiB. The smallest free block that fits is taken, and split where the rest is worth keeping; freed
blocks merge with free neighbours. A freed block is only used again on the stream it was made for, and one that other
streams used waits for them. Where the card is full, cached segments without any use are given back first.

With `expandable`, segments are address ranges that are mapped page by page (PYTORCH_ALLOC_CONF=
expandable_segments:True).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = ["Block", "CachingAllocator", "CardFull", "Counter", "Event", "Step", "least_capacity", "replay"]

MIB = 2**20
QUANTUM = 512
SMALL = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # from here on, segments are made to measure
LARGE_ROUNDING = 2 * MIB


@dataclass(frozen=True)
class Step:
    """One thing that was asked of an allocator; `block` numbers blocks in the order in which they were made."""

    what: Literal["malloc", "free", "use", "empty_cache"]
    block: int = 0
    size: int = 0
    stream: int = 0


class Event(Protocol):
    """A point on a stream's timeline."""

    def done(self) -> bool:
        """Whether the stream has passed it."""

    def wait(self) -> None:
        """Lets the host wait until it has."""


class CardFull(Exception):
    """A request that the card's memory does not hold, even after the cache was given back."""

    def __init__(self, requested: int, capacity: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{requested} bytes requested, {allocated} allocated, {reserved} reserved of {capacity}")
        self.requested, self.capacity, self.allocated, self.reserved = requested, capacity, allocated, reserved


@dataclass
class Counter:
    """A number of bytes and the most it has been."""

    now: int = 0
    peak: int = 0

    def add(self, difference: int) -> None:
        self.now += difference
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        self.peak = self.now


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) not mapped."""

    address: int
    size: int
    stream: int
    pool: _Pool
    number: int = 0
    requested: int = 0
    used: bool = False
    mapped: bool = True
    expandable: bool = False
    before: Block | None = None
    after: Block | None = None
    streams: set[int] = field(default_factory=set)  # others that used it
    awaited: int = 0  # events that must pass before it is free

    @property
    def idle(self) -> bool:
        return not self.used and not self.awaited and not self.streams

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.before is None and self.after is None


@dataclass(eq=False)
class _Pool:
    """Free blocks for small or for large requests, ordered by stream, size and address."""

    small: bool
    free: list[Block] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)

    def insert(self, block: Block) -> None:
        bisect.insort(self.free if block.mapped else self.unmapped, block, key=_order)

    def remove(self, block: Block) -> None:
        blocks = self.free if block.mapped else self.unmapped
        del blocks[bisect.bisect_left(blocks, _order(block), key=_order)]

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


def _order(block: Block) -> tuple[int, int, int]:
    return block.stream, block.size, block.address


class CachingAllocator:
    """The allocator of one card with `capacity` bytes for tensors.

    `record` makes an event at the end of a stream's timeline, for blocks that several streams use.
    """

    def __init__(self, capacity: int, record: Callable[[int], Event], *, expandable: bool = False) -> None:
        self.capacity = capacity
        self.expandable = expandable
        self.allocated, self.reserved, self.requested = Counter(), Counter(), Counter()
        self.retries = 0
        self.history: list[Step] = []
        self._made = itertools.count()
        self._record = record
        self._pools = {True: _Pool(small=True), False: _Pool(small=False)}
        self._waiting: dict[int, list[tuple[Event, Block]]] = {}  # by stream, oldest first
        self._next_address = 2 * MIB

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """A block of at least `requested` bytes; CardFull where there is none to be had."""
        number = next(self._made)
        self.history.append(Step("malloc", number, requested, stream))
        self._collect()
        size = rounded(requested)
        pool = self._pools[size <= SMALL]
        block = self._take_free(pool, size, stream) or self._grow(pool, size, stream)
        if block is None:
            self._release_cache()
            self.retries += 1
            block = self._grow(pool, size, stream)
        if block is None:
            raise CardFull(requested, self.capacity, self.allocated.now, self.reserved.now)
        if self._worth_splitting(block, size):
            self._split(block, size)
        block.used, block.number, block.requested = True, number, requested
        self.allocated.add(block.size)
        self.requested.add(requested)
        return block

    def free(self, block: Block) -> None:
        """Takes `block` back; it is free once every stream that used it has passed this point."""
        self.history.append(Step("free", block.number))
        block.used = False
        self.allocated.add(-block.size)
        self.requested.add(-block.requested)
        for stream in sorted(block.streams):
            self._waiting.setdefault(stream, []).append((self._record(stream), block))
            block.awaited += 1
        block.streams.clear()
        if not block.awaited:
            self._put_back(block)

    def use(self, block: Block, stream: int) -> None:
        """`stream`, not the one `block` was made for, works on it (torch's `record_stream`)."""
        self.history.append(Step("use", block.number, stream=stream))
        if stream != block.stream:
            block.streams.add(stream)

    def empty_cache(self) -> None:
        """Gives all segments that nothing uses back to the card."""
        self.history.append(Step("empty_cache"))
        self._release_cache()

    def _take_free(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """The smallest free block that fits, out of the pool."""
        index = bisect.bisect_left(pool.free, (stream, size, 0), key=_order)
        candidates = _of_stream(pool.free, index, stream)
        best = next(candidates, None)
        if best is None:
            return None
        for other in candidates if best.expandable else ():
            if _room(other) >= _room(best):
                break
            best = other
        pool.remove(best)
        return best

    def _grow(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """A free block from memory that the card still has; None where it has not enough."""
        if self.expandable:
            return self._expand(pool, size, stream)
        length = segment_size(size)
        if self.reserved.now + length > self.capacity:
            return None
        self.reserved.add(length)
        return Block(self._addresses(length), length, stream, pool)

    def _addresses(self, length: int, alignment: int = LARGE_ROUNDING) -> int:
        address = _up(self._next_address, alignment)
        self._next_address = address + length
        return address

    def _worth_splitting(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= QUANTUM if block.pool.small or self.expandable else rest > SMALL

    def _split(self, block: Block, size: int) -> None:
        """Keeps the first `size` bytes in `block`; the rest is a free block of its own."""
        rest = Block(block.address + size, block.size - size, block.stream, block.pool, expandable=block.expandable)
        _chain(block, rest, block.after)
        block.size = size
        block.pool.insert(rest)

    def _put_back(self, block: Block) -> None:
        self._merge(block)
        block.pool.insert(block)

    def _merge(self, block: Block) -> None:
        """Makes idle neighbours of `block`, which is in no pool, part of it."""
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.idle or neighbour.mapped != block.mapped:
                continue
            block.pool.remove(neighbour)
            block.size += neighbour.size
            if neighbour is block.before:
                block.address = neighbour.address
                _chain(neighbour.before, block, block.after)
            else:
                _chain(block.before, block, neighbour.after)

    def _collect(self, *, wait: bool = False) -> None:
        """Frees blocks whose other streams have passed the point where they were given up."""
        for stream, waiting in list(self._waiting.items()):
            while waiting and (wait or waiting[0][0].done()):
                event, block = waiting.pop(0)
                event.wait()
                block.awaited -= 1
                if not block.awaited:
                    self._put_back(block)
            if not waiting:
                del self._waiting[stream]

    def _release_cache(self) -> None:
        self._collect(wait=True)
        for pool in self._pools.values():
            for block in [block for block in pool.free if block.expandable]:
                self._unmap(block)
            for block in [block for block in pool.free if block.whole and not block.expandable]:
                pool.remove(block)
                self.reserved.add(-block.size)

    # expandable segments

    def _expand(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """Maps pages at the lowest address where `size` bytes are free or unmapped in a row."""
        block = self._expandable_place(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # what was mapped has taken its free neighbour in
        pool.remove(block)
        return block

    def _expandable_place(self, pool: _Pool, size: int, stream: int) -> Block:
        index = bisect.bisect_left(pool.unmapped, (stream, 0, 0), key=_order)
        for block in _of_stream(pool.unmapped, index, stream):
            first = block.before if block.before is not None and block.before.idle else block
            if _idle_run(first, size) >= size:
                return first
        length = _up(self.capacity + self.capacity // 8, pool.page)
        address = self._addresses(length, pool.page)
        block = Block(address, length, stream, pool, mapped=False, expandable=True)
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Maps whole pages from the start of the unmapped `block`, at least `size` bytes if the card has them."""
        pool, length = block.pool, min(_up(size, block.pool.page), block.size)
        if self.reserved.now + length > self.capacity:
            return False
        pool.remove(block)
        if length < block.size:
            rest = Block(block.address + length, block.size - length, block.stream, pool, mapped=False, expandable=True)
            _chain(block, rest, block.after)
            pool.insert(rest)
        block.size, block.mapped = length, True
        self.reserved.add(length)
        self._put_back(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives the whole pages inside the free `block` back."""
        pool, page = block.pool, block.pool.page
        first = _up(block.address, page)
        last = (block.address + block.size) // page * page
        if last <= first:
            return
        pool.remove(block)
        head, tail = first - block.address, block.address + block.size - last
        if head:
            kept = Block(block.address, head, block.stream, pool, expandable=True)
            _chain(block.before, kept, block)
            pool.insert(kept)
        if tail:
            kept = Block(last, tail, block.stream, pool, expandable=True)
            _chain(block, kept, block.after)
            pool.insert(kept)
        block.address, block.size, block.mapped = first, last - first, False
        self.reserved.add(first - last)
        self._put_back(block)


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


def least_capacity(history: Sequence[Step], *, expandable: bool = False) -> int:
    """The bytes that a card must have for `history` to fit, caches given back where that helps; a multiple of 2 MiB."""
    roomy = replay(history, 2**60, expandable=expandable)
    fits, fails = roomy.reserved.peak // LARGE_ROUNDING, roomy.allocated.peak // LARGE_ROUNDING - 1
    while fits - fails > 1:
        middle = (fits + fails) // 2
        try:
            replay(history, middle * LARGE_ROUNDING, expandable=expandable)
            fits = middle
        except CardFull:
            fails = middle
    return fits * LARGE_ROUNDING


def rounded(size: int) -> int:
    """Bytes of a block for a request of `size`."""
    return max(_up(size, QUANTUM), QUANTUM)


def segment_size(size: int) -> int:
    """Bytes of the segment that is reserved for a block of `size` where none is free."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return _up(size, LARGE_ROUNDING)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _of_stream(blocks: list[Block], index: int, stream: int) -> Iterator[Block]:
    while index < len(blocks) and blocks[index].stream == stream:
        yield blocks[index]
        index += 1


def _room(block: Block) -> int:
    """What `block` could grow to: it counts as that large when the best fit is looked for."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def _idle_run(block: Block | None, enough: int) -> int:
    """Bytes in a row from `block` on that nothing uses, mapped or not, up to `enough`."""
    size = 0
    while size < enough and block is not None and block.idle:
        size += block.size
        block = block.after
    return size


def _chain(*blocks: Block | None) -> None:
    """Makes `blocks` neighbours, in this order."""
    for left, right in itertools.pairwise(blocks):
        if left is not None:
            left.after = right
        if right is not None:
            right.before = left
