"""One simulated card: its allocator, its clock, and what kernels and copies do to them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tightfit.catalog.cuda import PAGEABLE, WORKSPACE_STAYS
from tightfit.errors import RunError
from tightfit.schema.machine import Accelerator
from tightfit.simulator.allocator import CachingAllocator, CardFull
from tightfit.simulator.blocks import Block, Counter
from tightfit.simulator.kernel_costs import KernelCost, duration
from tightfit.units import format_bytes

__all__ = ["Host", "Point", "SimulatedCard", "Timeline", "Values"]


Values = Literal["real", "shapes"]
_bases = itertools.count(2**44, 2**44)


@dataclass(eq=False)
class SimulatedCard:
    """A card that exists only here.

    `values` says what is kept of tensors: all numbers ("real"), or shapes, and the numbers of small ones ("shapes").
    """

    index: int
    accelerator: Accelerator
    host: Host
    values: Values = "shapes"
    expandable: bool = False  # segments: see CachingAllocator
    stream: int = 0  # the stream that work is given to
    base: int = field(default_factory=lambda: next(_bases))  # of its addresses, which are nobody else's
    timeline: Timeline = field(init=False)
    allocator: CachingAllocator = field(init=False)
    time_scale: float = 1.0  # times as long as its rates say that it computes and launches: see `at_pace`
    bytes_in: int = 0  # what has crossed the link
    bytes_out: int = 0
    watchers: list[Callable[[KernelCost], None]] = field(default_factory=list)  # told of each kernel while it runs
    awaiters: list[Callable[[], None]] = field(default_factory=list)  # told when the host waits for all it gave
    judge: Callable[[RunError], None] | None = None  # raises that numbers are unknown, or leaves it at zeros
    _streams: int = 0  # how many there are beside the usual one
    _workspaces: dict[tuple[int, int], Block] = field(default_factory=dict)  # by stream and size

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.host, round(self.accelerator.launch_overhead * 1e9))
        self.allocator = CachingAllocator(self.accelerator.bytes, self.timeline.record, expandable=self.expandable)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """What is done inside goes to `stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def at_pace(self, time_scale: float) -> None:
        """From now on all that it computes and launches takes `time_scale` times as long as its rates say."""
        self.time_scale, self.timeline.launch = time_scale, round(self.accelerator.launch_overhead * time_scale * 1e9)

    def new_stream(self) -> int:
        """A stream that nobody else has."""
        self._streams += 1
        return self._streams

    def malloc(self, size: int) -> Block:
        """A block for the current stream; torch's OutOfMemoryError where the card has none left."""
        retries = self.allocator.retries
        try:
            block = self.allocator.malloc(size, self.stream)
        except CardFull as full:
            free = full.capacity - full.reserved
            raise torch.OutOfMemoryError(
                f"simulated:{self.index} is out of memory. Tried to allocate {format_bytes(size)}. It has a capacity "
                f"of "
                f"{format_bytes(full.capacity)} of which {format_bytes(free)} is free; {format_bytes(full.allocated)} "
                f"is allocated by tensors, and {format_bytes(full.reserved - full.allocated)} is reserved but "
                "unallocated"
            ) from None
        if self.allocator.retries > retries:  # what is given back may be in use until the stream is done
            self.let_host_wait()
        return block

    def do(self, work: KernelCost) -> None:
        """Runs a kernel: what it holds comes and goes, and its time passes on the current stream."""
        held = work.held
        if WORKSPACE_STAYS:
            self._keep(work.workspaces)
        else:
            held += work.workspaces
        with self.holding(held):
            for watch in self.watchers:
                watch(work)
        self._let_pass(work)

    def repeat(self, work: KernelCost) -> None:
        """What `do` does beside asking for memory, and giving it back: others do that."""
        for watch in self.watchers:
            watch(work)
        self._let_pass(work)

    def _let_pass(self, work: KernelCost) -> None:
        self.timeline.run(self.stream, "compute", round(duration(work, self.accelerator) * self.time_scale))
        if self.accelerator.is_cpu:  # it computes by itself what it would launch elsewhere
            self.record().wait()

    def _keep(self, workspaces: Sequence[int]) -> None:
        for size in workspaces:
            if (self.stream, size) not in self._workspaces:
                self._workspaces[self.stream, size] = self.malloc(size)

    @contextlib.contextmanager
    def holding(self, sizes: Sequence[int]) -> Iterator[None]:
        """There are buffers of these sizes inside."""
        blocks: list[Block] = []
        try:
            for size in filter(None, sizes):
                blocks.append(self.malloc(size))
            yield
        finally:
            for block in blocks:
                self.allocator.free(block)

    @property
    def live(self) -> Counter:
        """Bytes of tensors: as CUDA's allocator hands them out, or as they are where the CPU's does."""
        return self.allocator.requested if self.accelerator.is_cpu else self.allocator.allocated

    @property
    def held(self) -> Counter:
        """Bytes that the allocator keeps for tensors."""
        return self.allocator.requested if self.accelerator.is_cpu else self.allocator.reserved

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS keeps on this card."""
        return sum(block.size for block in self._workspaces.values())

    @property
    def workspace_numbers(self) -> set[int]:
        """By which numbers its allocator's history calls them."""
        return {block.number for block in self._workspaces.values()}

    def copy_in(self, size: int, *, pinned: bool, wait: bool) -> None:
        """`size` bytes from the host. From pageable memory, the host always waits."""
        self.bytes_in += size
        self._cross("in", size, self.accelerator.link_rate, pinned=pinned, wait=wait)

    def copy_out(self, size: int, *, pinned: bool, wait: bool) -> None:
        """`size` bytes to the host."""
        self.bytes_out += size
        rate = self.accelerator.link_rate_out or self.accelerator.link_rate
        self._cross("out", size, rate, pinned=pinned, wait=wait)

    def _cross(self, engine: str, size: int, rate: float | None, *, pinned: bool, wait: bool) -> None:
        if not size:  # torch gives a card nothing to do for that (copy_impl in aten/src/ATen/native/Copy.cpp)
            return
        time = size / (rate * (1.0 if pinned else PAGEABLE)) if rate else 0.0
        self.timeline.run(self.stream, engine, round(time * 1e9))
        if wait or not pinned:
            self.let_host_wait()

    def let_host_wait(self) -> None:
        """Until the current stream has done what it was given."""
        self.record().wait()
        for tell in self.awaiters:
            tell()

    def record(self) -> Point:
        """An event at the end of what the current stream was given."""
        return self.timeline.record(self.stream)

    @property
    def now(self) -> int:
        """Nanoseconds until all that was given is done."""
        return max(self.host.now, self.timeline.end)


@dataclass
class Host:
    """The thread that launches: it is ahead of the streams until it waits for one."""

    now: int = 0


@dataclass(frozen=True)
class Point:
    """A point on a stream's timeline."""

    host: Host
    time: int

    def done(self) -> bool:
        """Whether the stream has passed it by now."""
        return self.time <= self.host.now

    def wait(self) -> None:
        """Lets the host wait until it has."""
        self.host.now = max(self.host.now, self.time)


@dataclass
class Timeline:
    """The streams and engines of one card."""

    host: Host
    launch: int  # nanoseconds of the host for each piece of work
    _streams: dict[int, int] = field(default_factory=dict)  # when each has done all it was given
    _engines: dict[str, int] = field(default_factory=dict)

    def run(self, stream: int, engine: str, duration: int) -> tuple[int, int]:
        """Gives `stream` work of `duration` nanoseconds on `engine`; returns when it begins and ends."""
        self.host.now += self.launch
        begin = max(self.host.now, self._streams.get(stream, 0), self._engines.get(engine, 0))
        self._streams[stream] = self._engines[engine] = end = begin + duration
        return begin, end

    def record(self, stream: int) -> Point:
        """The point at the end of what `stream` was given so far (an event recorded there)."""
        return Point(self.host, self._streams.get(stream, 0))

    def wait(self, stream: int, point: Point) -> None:
        """What `stream` is given from now on begins after `point`."""
        self._streams[stream] = max(self._streams.get(stream, 0), point.time)

    @property
    def end(self) -> int:
        """When all streams have done what they were given."""
        return max(self._streams.values(), default=0)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.host.now = max(self.host.now, self.end)
