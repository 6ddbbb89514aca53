"""torch's own caching allocator beside the simulated one: the same requests, the same bytes after each."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch

from tightfit.devices.cuda_support import cuda_count
from tightfit.simulator.allocator import CachingAllocator, CardFull
from tightfit.simulator.blocks import Block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]
MIB = 2**20
STEPS = 150
FEW_SIZES = tuple(int(size * MIB) for size in (0.3, 0.9, 1.2, 2, 3, 4, 5, 9, 12, 30, 31, 33))


class Passed:
    """An event of a stream that has nothing to do."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Both:
    """What is asked of both allocators."""

    def __init__(self, limit: int, *, expandable: bool) -> None:
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
        total = torch.cuda.get_device_properties(0).total_memory
        self.simulated = CachingAllocator(total, lambda stream: Passed(), expandable=expandable)
        self.simulated.capacity = limit
        self.alive: list[tuple[torch.Tensor, Block]] = []
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        self.retries = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.set_per_process_memory_fraction((limit + 1) / total)
        grow(expandable)

    def malloc(self, size: int, stream: int) -> str:
        try:
            block = self.simulated.malloc(size, stream)
        except CardFull:
            block = None
        try:
            with torch.cuda.stream(self.streams[stream]):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            assert block is None, f"{size} bytes: torch has none, the simulation has some"
            return "refused"
        assert block is not None, f"{size} bytes: torch has some, the simulation has none"
        self.alive.append((tensor, block))
        return f"malloc {size} on {stream}"

    def free(self, which: int) -> str:
        tensor, block = self.alive.pop(which)
        self.simulated.free(block)
        del tensor
        return f"free {block.size}"

    def use(self, which: int, stream: int) -> str:
        tensor, block = self.alive[which]
        tensor.record_stream(self.streams[stream])
        self.simulated.use(block, stream)
        return f"use {block.size} on {stream}"

    def empty_cache(self) -> str:
        torch.cuda.empty_cache()
        self.simulated.empty_cache()
        return "empty_cache"

    def switch(self) -> str:
        self.simulated.expandable = not self.simulated.expandable
        grow(self.simulated.expandable)
        return f"expandable {self.simulated.expandable}"

    def state(self) -> Iterator[tuple[str, int, int]]:
        counted = torch.cuda.memory_stats()
        yield "allocated", counted["allocated_bytes.all.current"], self.simulated.allocated.now
        yield "reserved", counted["reserved_bytes.all.current"], self.simulated.reserved.now
        yield "retries", counted["num_alloc_retries"] - self.retries, self.simulated.retries

    def close(self) -> None:
        while self.alive:
            self.free(0)
        self.empty_cache()


def grow(expandable: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")


def compare(
    seed: int, limit: int, *, expandable: bool, switches: bool = False, sizes: Sequence[int] | None = None
) -> None:
    """Asserts that both say the same after each of many random steps.

    Sizes differ, so that no two blocks tie, or are of a few `sizes`, so that many do.
    """
    chance, both, told = random.Random(seed), Both(limit, expandable=expandable), []
    for _ in range(STEPS):
        kind = chance.random()
        if kind < 0.55 or not both.alive:
            size = chance.choice(sizes) if sizes else int(2 ** chance.uniform(0, 26.5))
            told.append(both.malloc(size, int(chance.random() < 0.2)))
        elif kind < 0.9:
            told.append(both.free(chance.randrange(len(both.alive))))
        elif kind < 0.95:
            told.append(both.use(chance.randrange(len(both.alive)), chance.randrange(2)))
        elif switches and kind < 0.97:
            told.append(both.switch())
        elif kind > 0.985:
            told.append(both.empty_cache())
        for name, real, simulated in both.state():
            assert real == simulated, f"{name}: {real} and {simulated} after {told[-12:]} ({len(told)}, seed {seed})"
    both.close()


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit", [300, 700, 4000])
def test_bytes_are_those_of_torchs_allocator(limit: int, expandable: bool) -> None:
    run(f"many({limit}, {expandable})")


@pytest.mark.skipif(torch.__version__ < "2.12", reason="which of several blocks is taken depends on their addresses")
@pytest.mark.parametrize("expandable", [False, True])
def test_of_blocks_of_the_same_size_the_same_one_is_taken(expandable: bool) -> None:
    run(f"many(4000, {expandable}, FEW_SIZES)")


def run(call: str) -> None:
    """In a process of its own, whose allocator nobody has used."""
    call = f"from gpu.test_cuda_allocator import *; {call}"
    # events are done at once: when another stream gives a block back is the clock's to say, not the allocator's
    at_once = os.environ | {"STUB_ASYNC": "0"}
    command = [sys.executable, "-c", call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=at_once)
    assert done.returncode == 0, done.stderr[-3000:]


def many(limit: int, expandable: bool, sizes: Sequence[int] | None = None) -> None:
    torch.cuda.init()
    for seed in range(40):
        compare(seed, limit * MIB, expandable=expandable, switches=not sizes and seed % 4 == 3, sizes=sizes)
