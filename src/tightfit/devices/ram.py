"""Host memory: what this process may use, what it holds, and what its control groups have left. No torch is loaded."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["GroupMemory", "by_windows", "computer_mark", "group_memory", "held_bytes", "pinnable_bytes", "ram_bytes",
           "ram_free", "ram_limit"]  # fmt: skip

GROUPS = Path("/sys/fs/cgroup")  # mount point of control groups
OWN_GROUPS = Path("/proc/self/cgroup")  # lists the control groups of this process
STATUS = Path("/proc/self/status")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a computer, another on each computer
UNLIMITED = 2**62  # bytes from which on a limit of version 1 means that there is none
# memory that the kernel drops before it refuses any
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


def computer_mark() -> str:
    """Text that processes have in common if they share RAM. Host names may be equal on several computers, or differ
    between containers of one; only systems that name nothing else are told apart by theirs.
    """
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return platform.node()


class GroupMemory(NamedTuple):
    """Memory of a control group, in bytes."""

    limit: int
    used: int  # what the kernel cannot drop, by all processes in it

    @property
    def free(self) -> int:
        return self.limit - self.used


def held_bytes() -> int:
    """Bytes of RAM that this process holds and the system cannot drop: resident memory that is not a file's pages."""
    with contextlib.suppress(OSError):
        found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        if found:
            return sum(map(int, found)) * 1024
    return int(psutil.Process().memory_info().rss)  # another system


def ram_bytes() -> int:
    """Bytes of RAM that this process may use: the machine's, or its control group's limit where that is less."""
    return ram_limit() or psutil.virtual_memory().total


def ram_limit() -> int | None:
    """Lowest limit in bytes of this process's control groups; None where none is below the machine's RAM."""
    least = min((group.limit for group in _groups_with_limit()), default=None)
    return least if least is not None and least < psutil.virtual_memory().total else None


def ram_free() -> int:
    """Bytes of RAM that this process could still take without swapping or being killed at a control group's limit."""
    return max(0, min([psutil.virtual_memory().available, *(group.free for group in _groups_with_limit())]))


def group_memory() -> GroupMemory | None:
    """The control group of this process that has the least left; None where none has a limit."""
    return min(_groups_with_limit(), key=lambda group: group.free, default=None)


def pinnable_bytes() -> int:
    """Upper bound of the bytes that CUDA could page-lock now; without a card `find_machine` reports 0 instead.

    On Linux the driver locks pages by its own means: RLIMIT_MEMLOCK limits mlock() only. Locked pages count as used RAM
    (of the control group, too), so the bound is the free RAM. Windows lets the driver have about half of the RAM
    (ComfyUI's model_management.py uses 40 % for it). On WSL, "pinned system memory availability for applications is
    limited" (NVIDIA's CUDA on WSL guide) without a number: half is the bound there too, and in containers 0.5 to 1 GB
    has been seen (microsoft/WSL#14078, NVIDIA/nvidia-docker#1725). So callers that page-lock must handle a refusal.
    """
    return min(ram_free(), ram_bytes() // 2) if by_windows() else ram_free()


def by_windows() -> bool:
    """Whether the driver is that of Windows, or of WSL."""
    return platform.system() == "Windows" or "microsoft" in platform.release().lower()


def _groups_with_limit() -> Iterator[GroupMemory]:
    """Yield the memory of each control group of this process that has a limit: version 2, then version 1.

    Above `high` the kernel does not kill, but slows down everything, so that it is a limit like `max`.
    """
    for folder in _groups():
        for limits, used in ((("max", "high"), "current"), (("limit_in_bytes",), "usage_in_bytes")):
            sizes = [size for name in limits if (size := _number(folder / f"memory.{name}")) is not None]
            taken = _number(folder / f"memory.{used}")
            if sizes and taken is not None and min(sizes) < UNLIMITED:
                yield GroupMemory(min(sizes), max(0, taken - _reclaimable(folder / "memory.stat")))


def _number(file: Path) -> int | None:
    """The number in `file`; None where there is none ("max": no limit), or no file (of the other version)."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _reclaimable(stat: Path) -> int:
    """Cached pages of files, and what else the kernel drops before it refuses memory."""
    with contextlib.suppress(OSError, ValueError):
        kept = dict(line.split() for line in stat.read_text().splitlines())
        prefix = "total_" if "total_cache" in kept else ""  # version 1 counts nested groups in separate fields
        return sum(int(kept.get(f"{prefix}{name}", 0)) for name in _RECLAIMABLE)
    return 0


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's memory control groups, version 2 and version 1, and of their parents.

    In a container the group's path is often the path outside of it, while the mount point is the group itself: folders
    that do not exist are skipped by the caller, and the last folder always exists.
    """
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    paths = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines)}
    for root, kind in ((GROUPS, ""), (GROUPS / "memory", "memory")):
        own = Path(paths.get(kind, "/").lstrip("/"))
        yield from (root / path for path in (own, *own.parents))
