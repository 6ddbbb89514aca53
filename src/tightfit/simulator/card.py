"""One simulated card: its allocator, its clock, and the effects of kernels and copies on both."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tightfit.catalog.cuda import KEEPS_WORKSPACE, PAGEABLE
from tightfit.errors import RunError
from tightfit.schema.machine import EXCHANGES, Accelerator
from tightfit.simulator.allocator import CachingAllocator, CardFull
from tightfit.simulator.blocks import Block, Counter
from tightfit.simulator.kernel_costs import KernelCost, duration
from tightfit.simulator.timeline import Host, Point, Time, Timeline
from tightfit.units import format_bytes

__all__ = ["SimulatedCard", "Values"]


Values = Literal["real", "shapes"]
_bases = itertools.count(2**44, 2**44)


@dataclass(eq=False)
class SimulatedCard:
    """A simulated card.

    `values` selects which tensor values are kept: all ("real"), or shapes, and the values of small tensors ("shapes").
    """

    index: int
    accelerator: Accelerator
    host: Host
    values: Values = "shapes"
    expandable: bool = False  # whether segments are expandable, see CachingAllocator
    history: bool = True  # whether the allocator records its calls, a few thousand a call of a tiny pipeline
    stream: int = 0  # the current stream
    base: int = field(default_factory=lambda: next(_bases))  # start of its address range, unique to this card
    timeline: Timeline = field(init=False)
    allocator: CachingAllocator = field(init=False)
    time_scale: float = 1.0  # factor on the duration of kernels and launches, see `at_pace`
    bytes_in: int = 0  # bytes copied from the host
    bytes_out: int = 0
    kernel_callbacks: list[Callable[[KernelCost], None]] = field(default_factory=list)  # called during each kernel
    sync_callbacks: list[Callable[[int], None]] = field(
        default_factory=list
    )  # called by `block_host`, with `copied_in`
    # whether zeros take the place of unknown values, which the RunError is about; None: never
    accepts_zeros: Callable[[RunError], bool] | None = None
    _streams: int = 0  # number of streams beside stream 0
    _beside: int = 0  # the stream of `run_beside`; 0: none yet
    _workspaces: dict[tuple[int, int], Block] = field(default_factory=dict)  # cuBLAS workspaces by (stream, bytes)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.host, round(self.accelerator.launch_overhead * 1e9))
        self.allocator = CachingAllocator(
            self.accelerator.bytes, self.timeline.record, expandable=self.expandable, keep=self.history
        )

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make `stream` the current stream inside the context."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def set_time_scale(self, time_scale: float) -> None:
        """From now on multiply the durations of kernels and launches by `time_scale`."""
        self.time_scale, self.timeline.launch = time_scale, round(self.accelerator.launch_overhead * time_scale * 1e9)

    def forget_callbacks(self) -> None:
        """Call nothing any more."""
        self.kernel_callbacks.clear()
        self.sync_callbacks.clear()
        self.accepts_zeros = None

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._streams += 1
        return self._streams

    def malloc(self, size: int) -> Block:
        """Allocate a block of `size` bytes on the current stream; torch.OutOfMemoryError where the card is full."""
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
        if self.allocator.retries > retries:  # memory that is returned may be in use until the stream is done
            self.block_host()
        return block

    def run_kernel(self, work: KernelCost) -> None:
        """Run a kernel: allocate and free its buffers, and add its duration to the current stream."""
        work = self._after_module_calls(work)
        held = work.held
        if KEEPS_WORKSPACE:
            self._keep(work.workspaces)
        else:
            held += work.workspaces
        with self.holding(held):
            for watch in self.kernel_callbacks:
                watch(work)
        self._let_pass(work)

    def run_beside(self, work: KernelCost) -> Callable[[], None]:
        """Start a kernel beside the current stream, after what was submitted to it; return how to make it wait."""
        submitted = self.record()
        for watch in self.kernel_callbacks:
            watch(work)
        beside = self._beside = self._beside or self.new_stream()
        self.timeline.wait(beside, submitted)
        self.timeline.run(beside, "beside", self._duration(work), taking=self._taken_of_link(work))
        ended = self.timeline.record(beside)
        return lambda: self.timeline.wait(self.stream, ended)

    def repeat(self, work: KernelCost) -> None:
        """Same as `run_kernel`, of a recorded kernel and without allocating buffers: the caller does that."""
        work = self._after_module_calls(work)
        for watch in self.kernel_callbacks:
            watch(work)
        self._let_pass(work)

    def _after_module_calls(self, work: KernelCost) -> KernelCost:
        """Return `work` with the module calls since the last kernel, which count for it from now on."""
        if not self.host.module_calls:
            return work
        counted = dataclasses.replace(work, module_calls=work.module_calls + self.host.module_calls)
        self.host.module_calls = 0
        return counted

    def _let_pass(self, work: KernelCost) -> None:
        self.host.work(round(work.module_calls * self.accelerator.module_overhead * self.time_scale * 1e9))
        self.timeline.run(self.stream, "compute", self._duration(work), taking=self._taken_of_link(work))
        if self.accelerator.is_cpu:  # a CPU computes synchronously instead of launching
            self.record().wait()

    def _duration(self, work: KernelCost) -> int:
        return round(duration(work, self.accelerator) * self.time_scale)

    def _taken_of_link(self, work: KernelCost) -> dict[str, int]:
        """Nanoseconds that an exchange through the host takes of copies in each direction."""
        if work.kind not in EXCHANGES:
            return {}
        seconds = self.accelerator.exchange_link_seconds(work.kind, work.amounts.traffic)
        return dict.fromkeys(("in", "out"), round(seconds * self.time_scale * 1e9))

    def _keep(self, workspaces: Sequence[int]) -> None:
        for size in workspaces:
            if (self.stream, size) not in self._workspaces:
                self._workspaces[self.stream, size] = self.malloc(size)

    @contextlib.contextmanager
    def holding(self, sizes: Sequence[int]) -> Iterator[None]:
        """Hold buffers of these sizes, in bytes, inside the context."""
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
        """Bytes of live tensors: rounded as CUDA's allocator does, or as requested where the accelerator is a CPU."""
        return self.allocator.requested if self.accelerator.is_cpu else self.allocator.allocated

    @property
    def held(self) -> Counter:
        """Bytes that the allocator has reserved; where the accelerator is a CPU, bytes requested."""
        return self.allocator.requested if self.accelerator.is_cpu else self.allocator.reserved

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the cuBLAS workspaces kept on this card."""
        return sum(block.size for block in self._workspaces.values())

    @property
    def workspace_numbers(self) -> set[int]:
        """Block numbers of these workspaces in the allocator's history."""
        return {block.number for block in self._workspaces.values()}

    def copy_in(self, size: int, *, pinned: bool, wait: bool) -> None:
        """Simulate a copy of `size` bytes from the host. A copy from pageable memory always blocks the host."""
        self.bytes_in += size
        self._cross("in", size, self.accelerator.link_rate, pinned=pinned, wait=wait)

    def copy_out(self, size: int, *, pinned: bool, wait: bool) -> None:
        """Simulate a copy of `size` bytes to the host. A copy to pageable memory always blocks the host."""
        self.bytes_out += size
        rate = self.accelerator.link_rate_out or self.accelerator.link_rate
        self._cross("out", size, rate, pinned=pinned, wait=wait)

    def _cross(self, engine: str, size: int, rate: float | None, *, pinned: bool, wait: bool) -> None:
        if not size:  # torch submits no copy then (copy_impl in aten/src/ATen/native/Copy.cpp)
            return
        time = size / (rate * (1.0 if pinned else PAGEABLE)) if rate else 0.0
        self.timeline.run(self.stream, engine, round(time * 1e9))
        if wait or not pinned:
            self.block_host(0 if pinned or engine == "out" else size)

    def block_host(self, copied_in: int = 0) -> None:
        """Block the host until the current stream has done all submitted work.

        The last of it was a copy of `copied_in` bytes from pageable host memory, if any.
        """
        self.record().wait()
        for tell in self.sync_callbacks:
            tell(copied_in)

    def record(self) -> Point:
        """Return an event after all work submitted to the current stream so far."""
        return self.timeline.record(self.stream)

    @property
    def end(self) -> Time:
        """When all submitted work is done."""
        return max(self.host.time, self.timeline.end)

    @property
    def now(self) -> int:
        """Nanoseconds at which all submitted work is done."""
        return self.end.now
