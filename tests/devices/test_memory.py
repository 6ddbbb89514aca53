"""Arenas: where they start, what they cost, and that they go when the last tensor on them goes."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tightfit.devices.memory import RELEASED_AT_ONCE, arena, move_into, resident_bytes
from tightfit.errors import InputError, RunError

MIB = 2**20
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the maps of the process from /proc")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def flags(address: int) -> list[str]:
    """How the kernel treats the memory at `address`: "hg" for huge pages (proc_pid_smaps(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 777])
def test_it_has_the_size_and_starts_where_it_should(size: int) -> None:
    several = [arena(size) for _ in range(3)]
    for number, one in enumerate(several):
        assert one.shape == (size,)
        assert one.dtype == torch.uint8
        assert one.device.type == "cpu"
        assert one.data_ptr() % (2 * MIB if size >= 2 * MIB else 4096) == 0
        assert not one.any()
        one.fill_(number + 1)
    assert [set(one.unique().tolist()) for one in several] == [{number + 1} if size else set() for number in range(3)]


def test_nothing_is_taken_before_it_is_touched_and_all_goes_with_the_last_view() -> None:
    size, slack = 192 * MIB, 32 * MIB
    before = resident()
    whole = arena(size)
    assert resident() - before < slack
    whole.fill_(1)
    assert resident() - before > size - slack
    view = whole[5:9].view(2, 2)
    del whole
    assert resident() - before > size - slack
    assert view.tolist() == [[1, 1], [1, 1]]
    del view
    assert resident() - before < slack


@needs_linux
def test_its_addresses_are_given_back() -> None:
    one = arena(64 * MIB)
    first, last = one.data_ptr(), one.data_ptr() + one.numel() - 1
    parameter = torch.nn.Parameter(one[-4096:].view(torch.bfloat16), requires_grad=False)
    del one
    assert is_mapped(first)
    assert is_mapped(last)
    del parameter
    assert not is_mapped(first)
    assert not is_mapped(last)


@needs_linux
def test_whole_huge_pages_are_advised_and_nothing_else() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    one = arena(4 * MIB + 4096)
    start = one.data_ptr()
    assert "hg" in flags(start)
    assert "hg" in flags(start + 4 * MIB - 1)
    assert "hg" not in flags(start + 4 * MIB)
    assert "hg" not in flags(arena(MIB).data_ptr())
    assert "sh" not in flags(start), "shared memory gets huge pages by another switch"


@pytest.mark.parametrize(("place", "name", "value"), [(sys, "platform", "darwin"), (mmap, "MADV_HUGEPAGE", 9999)])
def test_systems_without_huge_pages_get_the_same_arena(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, value: object
) -> None:
    monkeypatch.setattr(place, name, value, raising=False)
    one = arena(3 * MIB)
    assert one.shape == (3 * MIB,)
    assert one.data_ptr() % (2 * MIB) == 0
    if Path("/proc/self/smaps").exists():
        assert "hg" not in flags(one.data_ptr())


def test_sizes_that_no_system_has_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="not -1"):
        arena(-1)
    with pytest.raises(RunError, match=f"arena of {2**60} bytes") as caught:
        arena(2**60)
    assert caught.value.facts == {"size": 2**60}


@needs_linux
def test_what_of_tensors_is_in_ram_is_told(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 * MIB))
    mapped = torch.from_file(str(file), size=8 * MIB, dtype=torch.uint8)
    own = torch.ones(4 * MIB, dtype=torch.uint8)
    assert resident_bytes([own]) == own.nbytes
    assert resident_bytes([own, own]) == own.nbytes
    mapped.sum()
    assert resident_bytes([mapped]) == 0  # the system can drop what it has read
    mapped[: 2 * MIB].fill_(1)
    assert resident_bytes([mapped, own]) == 2 * MIB + own.nbytes
    assert resident_bytes([]) == 0


HEAP = """
import psutil, torch, sys
from tightfit.devices.memory import map_large_tensors

def idle():
    "Bytes that stay with the process of many tensors, between two that are needed."
    before = psutil.Process().memory_info().rss
    tensors = [torch.ones(3 * 2**20, dtype=torch.uint8) for _ in range(64)]
    del tensors[:-1]
    return psutil.Process().memory_info().rss - before

torch.ones(31 * 2**20, dtype=torch.uint8)  # from now on, glibc takes what is smaller from its heap
usual = idle()
tensors = [torch.ones(3 * 2**20, dtype=torch.uint8) for _ in range(64)]
above = torch.ones(2**19, dtype=torch.uint8)  # small, and in the heap for long: what is below it stays there
del tensors
undo = map_large_tensors()
now = idle()
undo()
print(usual, now, idle())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other heaps")
def test_tensors_with_maps_of_their_own_leave_nothing_idle() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP], stdout=subprocess.PIPE, text=True, check=True)
    usual, now, later = map(int, done.stdout.split())
    assert now < 8 * MIB
    assert usual > 100 * MIB
    assert later > 100 * MIB


@needs_linux
def test_what_is_copied_is_not_there_twice(tmp_path: Path) -> None:
    """In a process of its own, whose memory nothing else changes."""
    program = f"""
import torch
from tightfit.devices.memory import arena, move_into
size = {8 * RELEASED_AT_ONCE}
right = (torch.arange(size // 8) % 1000003).view(-1, 64).t()
numbers = torch.empty_strided(right.shape, right.stride(), dtype=right.dtype).copy_(right)
target = arena(size).view(torch.int64).as_strided(numbers.shape, numbers.stride())
def most():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the highest so far is forgotten
before = most()
move_into(target, numbers)
more = most() - before
assert torch.equal(numbers, right) and numbers.data_ptr() == target.data_ptr()
assert more < {3 * RELEASED_AT_ONCE}, more
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_linux
@pytest.mark.parametrize("who", ["a view", "numpy", "the storage", "shared memory", "small"])
def test_what_others_can_see_is_only_copied(who: str) -> None:
    size = RELEASED_AT_ONCE // 2 if who == "small" else 2 * RELEASED_AT_ONCE
    source = torch.from_numpy(np.full(size, 7, np.uint8)) if who == "numpy" else torch.full((size,), 7).to(torch.uint8)
    kept = {"a view": lambda: source.view(-1, 2), "numpy": source.numpy, "the storage": source.untyped_storage}
    others = kept.get(who, lambda: None)()
    if who == "shared memory":
        source.share_memory_()
    target = arena(size)
    move_into(target, source)
    assert source.data_ptr() == target.data_ptr()
    assert bool((source == 7).all())
    if who in ("a view", "the storage"):
        seen = others if who == "a view" else torch.empty(0, dtype=torch.uint8).set_(others)
        assert bool((seen == 7).all())


@needs_linux
def test_who_interrupts_a_move_finds_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.full((4 * RELEASED_AT_ONCE,), 7, dtype=torch.uint8), arena(4 * RELEASED_AT_ONCE)
    library, calls = ctypes.CDLL, []

    def interrupted(name: None) -> ctypes.CDLL:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return library(name)

    monkeypatch.setattr("tightfit.devices.memory.ctypes.CDLL", interrupted)
    with pytest.raises(KeyboardInterrupt):
        move_into(target, source)
    assert source.data_ptr() != target.data_ptr()
    assert bool((source == 7).all())
