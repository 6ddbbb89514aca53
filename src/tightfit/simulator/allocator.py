"""Simulates torch's CUDA caching allocator: blocks, segments, and out-of-memory behaviour.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) with its default settings. Sizes are
rounded to 512 bytes. Requests up to 1 MiB use 2 MiB segments, up to 10 MiB use 20 MiB segments, larger ones use
segments rounded up to 2 MiB. The smallest free block that fits is taken, and split where the remainder is large enough;
freed blocks merge with free neighbours. A freed block is only reused on the stream it was allocated for, and after the
other streams that used it have passed the free. Where the card is full, unused cached segments are released first.

With `expandable`, segments are address ranges that are mapped page by page (PYTORCH_ALLOC_CONF=
expandable_segments:True). A limit (`set_per_process_memory_fraction`, which is how a budget is set) is compared with
all reserved bytes plus the whole request, even if part of it is mapped already; the pages that are then mapped may
exceed it.

Which of several free blocks of equal size is taken differs: torch 2.12 takes the one created first. 2.11 takes the one
with the lowest address, which is the driver's choice; here addresses rise. 2.13 and 2.14 do the same, on a stub of the
driver whose addresses fall: by the oldest segment, it seems.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from tightfit.simulator.blocks import (
    LARGE_ROUNDING,
    QUANTUM,
    SMALL,
    Block,
    Counter,
    Entry,
    Pool,
    chain,
    growable_size,
    idle_run,
    range_size,
    round_up,
    rounded,
    segment_size,
)

__all__ = ["AllocatorEvent", "CachingAllocator", "CardFull", "StreamEvent"]

_OLDEST_FIRST = torch.__version__.startswith("2.12.")


class AllocatorEvent(NamedTuple):
    """One call of an allocator; `block` numbers blocks in order of creation, `size` is in bytes."""

    what: Literal["malloc", "free", "use", "empty_cache"]
    block: int = 0
    size: int = 0
    stream: int = 0


class StreamEvent(Protocol):
    """A point on a stream's timeline."""

    def done(self) -> bool:
        """Whether the stream has passed it."""

    def wait(self) -> None:
        """Block the host until the stream has passed it."""


class CardFull(Exception):
    """A request does not fit in the card's memory, even after the cache was released. All attributes are in bytes."""

    def __init__(self, requested: int, capacity: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{requested} bytes requested, {allocated} allocated, {reserved} reserved of {capacity}")
        self.requested, self.capacity, self.allocated, self.reserved = requested, capacity, allocated, reserved


class CachingAllocator:
    """The allocator of one card with `capacity` bytes for tensors; a lower `capacity` set later acts as a limit.

    `record` returns an event at the end of a stream's timeline, for blocks that several streams use.
    """

    def __init__(
        self, capacity: int, record: Callable[[int], StreamEvent], *, expandable: bool = False, keep: bool = True
    ) -> None:
        """`keep`: record all calls in `history`."""
        self.capacity = self._total = capacity
        self.expandable = expandable
        self.allocated, self.reserved, self.requested = Counter(), Counter(), Counter()
        self.retries = 0
        self.history: list[AllocatorEvent] = []
        self._keep = keep
        self._made = itertools.count()
        self._record = record
        self._pools = {small: Pool(small, _OLDEST_FIRST) for small in (True, False)}
        self._waiting: dict[int, list[tuple[StreamEvent, Block]]] = {}  # freed, by other stream in use
        self._next_address = LARGE_ROUNDING

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """Return a block of at least `requested` bytes; CardFull where the card has no memory for it."""
        number = next(self._made)
        if self._keep:
            self.history.append(AllocatorEvent("malloc", number, requested, stream))
        if self._waiting:
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
            block.split(size)
        block.used, block.number, block.requested = True, number, requested
        self.allocated.add(block.size)
        self.requested.add(requested)
        return block

    def free(self, block: Block) -> None:
        """Free `block`; it is reusable once every stream that used it has passed this point."""
        if self._keep:
            self.history.append(AllocatorEvent("free", block.number))
        block.used = False
        self.allocated.add(-block.size)
        self.requested.add(-block.requested)
        if block.streams:
            for stream in sorted(block.streams):
                self._waiting.setdefault(stream, []).append((self._record(stream), block))
                block.awaited += 1
            block.streams = frozenset()
        if not block.awaited:
            self._put_back(block)

    def use(self, block: Block, stream: int) -> None:
        """Record that `stream`, not the one `block` was allocated for, uses it (torch's `record_stream`)."""
        if self._keep:
            self.history.append(AllocatorEvent("use", block.number, stream=stream))
        if stream != block.stream:
            block.streams |= {stream}

    def empty_cache(self) -> None:
        """Return all unused segments to the card."""
        if self._keep:
            self.history.append(AllocatorEvent("empty_cache"))
        self._release_cache()

    def _take_free(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Remove the smallest free block that fits from the pool and return it; None if there is none."""
        free, at = pool.free, pool.first_fitting(size, stream)
        if at == len(free) or free[at][0] != stream:
            return None
        if self.expandable:
            at = self._least_roomy(free, at)
        else:
            while free[at][3].expandable:  # expandable segments were switched off meanwhile
                at += 1
                if at == len(free) or free[at][0] != stream:
                    return None
        return free.pop(at)[3]

    def _least_roomy(self, free: Sequence[Entry], at: int) -> int:
        """Index of the first block of its stream, from `at` on, whose successor can grow to at least the same size."""
        stream, _, _, best = free[at]
        for following in range(at + 1, len(free)):
            if not best.expandable or free[following][0] != stream:
                break
            other = free[following][3]
            if self._is_roomier(other, best):
                break
            at, best = following, other
        return at

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return a free block in newly reserved memory; None where the card has not enough."""
        length = segment_size(size)
        if not self._has(length, self.capacity):
            return None
        if self.expandable:
            return self._expand(pool, size, stream)
        self.reserved.add(length)
        return Block(self._addresses(length), length, stream, pool)

    def _has(self, length: int, most: int) -> bool:
        """Whether `length` more bytes may be reserved if at most `most` bytes may be."""
        return self.reserved.now + length <= most

    def _is_roomier(self, block: Block, other: Block) -> bool:
        """Whether `block` can grow to at least the size that `other` can grow to."""
        return growable_size(block) >= growable_size(other)

    def _fits_behind(self, block: Block, size: int) -> bool:
        """Whether `size` contiguous bytes from the start of `block` on are idle."""
        return idle_run(block, size) >= size

    def _addresses(self, length: int, alignment: int = LARGE_ROUNDING) -> int:
        address = round_up(self._next_address, alignment)
        self._next_address = address + length
        return address

    def _worth_splitting(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= QUANTUM if block.pool.small or self.expandable else rest > SMALL

    def _put_back(self, block: Block) -> None:
        block.merge_neighbours()
        block.pool.insert(block)

    def _collect(self, *, wait: bool = False) -> None:
        """Free blocks whose other streams have passed the point of the free; `wait`: wait for them all."""
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
            for block in [block for *_, block in pool.free if block.expandable]:
                self._unmap(block)
            for block in [block for *_, block in pool.free if block.whole and not block.expandable]:
                pool.remove(block)
                self.reserved.add(-block.size)

    # expandable segments

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages at the lowest address where `size` contiguous bytes are free or unmapped; None if out of memory."""
        block = self._expandable_place(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # the mapped block has merged with its free neighbour
        pool.remove(block)
        return block

    def _expandable_place(self, pool: Pool, size: int, stream: int) -> Block:
        for block in pool.holes(stream):
            first = block.before if block.before is not None and block.before.idle else block
            if self._fits_behind(first, size):
                return first
        length = range_size(self._total, pool.page)
        address = self._addresses(length, pool.page)
        block = Block(address, length, stream, pool, mapped=False, expandable=True)
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages at the start of the unmapped `block`, at least `size` bytes; False if the card is full."""
        pool, length = block.pool, min(round_up(size, block.pool.page), block.size)
        if not self._has(length, self._total):
            return False
        pool.remove(block)
        if length < block.size:
            rest = Block(block.address + length, block.size - length, block.stream, pool, mapped=False, expandable=True)
            chain(block, rest, block.after)
            pool.insert(rest)
        block.size, block.mapped = length, True
        self.reserved.add(length)
        self._put_back(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages inside the free `block`."""
        pool, page = block.pool, block.pool.page
        first = round_up(block.address, page)
        last = (block.address + block.size) // page * page
        if last <= first:
            return
        pool.remove(block)
        head, tail = first - block.address, block.address + block.size - last
        if head:
            kept = Block(block.address, head, block.stream, pool, expandable=True)
            chain(block.before, kept, block)
            pool.insert(kept)
        if tail:
            kept = Block(last, tail, block.stream, pool, expandable=True)
            chain(block, kept, block.after)
            pool.insert(kept)
        block.address, block.size, block.mapped = first, last - first, False
        self.reserved.add(first - last)
        self._put_back(block)
