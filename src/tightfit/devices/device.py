"""What every device offers, and the two that need no hardware: the CPU itself and the loopback card."""

from __future__ import annotations

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from tightfit.devices.copy_stream import CopyStream, HostCopyStream
from tightfit.devices.memory import arena, own_maps, trim_heap
from tightfit.errors import InputError

__all__ = [
    "CpuDevice",
    "Device",
    "LoopbackDevice",
    "by_windows",
    "pinnable_bytes",
    "ram_bytes",
    "ram_free",
    "ram_limit",
]

GROUPS = Path("/sys/fs/cgroup")  # where control groups are mounted
OWN_GROUPS = Path("/proc/self/cgroup")  # which of them this process is in


class Device(ABC):
    """One device. Host memory is the CPU's; device memory is the device's own, unless `separate` is False."""

    name: str  # "cpu", "cuda:0", "loopback"
    kind: str
    torch_device: torch.device
    separate: bool  # False: host memory is its memory, and moving weights "off the device" means nothing
    plain_copies_block = False  # whether the host waits for copies from memory that is not page-locked
    runs_ahead = False  # whether the clock may be read while the device is still busy with what it was given
    takes_threads = True  # whether any thread may send copies
    swaps_parameters = False  # True: `parameter.data` of a host parameter cannot become a tensor of this device

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host `tensor` in device memory, same dtype, shape and strides."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a device `tensor` in host memory, complete on return."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the device."""

    def free_bytes(self) -> int:
        """Memory of the device that new tensors could take now."""
        return self.total_bytes() - (self.allocated_bytes() or 0)

    def product_name(self) -> str | None:
        """What the device is sold as; None where nobody says."""
        return None

    def compute_capability(self) -> str | None:
        """Of a CUDA card, e.g. "8.9"."""
        return None

    def has_flash(self) -> bool:
        """Whether torch was compiled with flash attention for such a device."""
        return True

    def copy_stream(self) -> CopyStream:
        """A new queue of copies to the device, or from it."""
        return HostCopyStream()

    def allocate(self, size: int) -> torch.Tensor:
        """`size` bytes of device memory, as uint8 of shape (size,), with anything in them.

        Where that is host memory, whole sectors of a disk can be read into it directly.
        """
        if self.torch_device.type == "cpu":
            return arena(size)
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def allocate_host(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory for what is on the device, as uint8 of shape (size,); or only as a shape."""
        return arena(size)

    def pinnable(self) -> int:
        """Bytes of host memory that could be page-locked for copies to this device."""
        return 0

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        """Page-locks host memory that is there; returns how to unlock it, or None where that is refused."""
        return None

    def pinned(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory of the kind that copies to and from the device fastest, where there is any."""
        return arena(size)

    def allocated_bytes(self) -> int | None:
        """Bytes of live tensors as the device's own allocator counts them; None where it does not count."""
        return None

    def peak_bytes(self) -> int | None:
        """The most that `allocated_bytes` has been since `reset_peak`."""
        return None

    def peak_reserved_bytes(self) -> int:
        """The most that the device's allocator held, used or not, since `reset_peak`; 0 where there is none."""
        return 0

    def reset_peak(self) -> None:
        return None

    def use_layer(self) -> None:  # noqa: B027 - a real host takes its time by itself
        """A layer is about to be used whose weights came: a simulated host is busy with them."""

    def send_layer(self) -> None:  # noqa: B027
        """Weights are about to be sent that do not stay: a simulated host is busy with that."""

    def synchronize(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Waits until the device has done all that it was given."""

    def now(self) -> float:
        """Seconds on the device's clock, from any start."""
        return time.perf_counter()

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes to do all that `work()` gives it, from idle to idle."""
        self.synchronize()
        start = self.now()
        work()
        self.synchronize()
        return self.now() - start

    def grow_segments(self) -> Callable[[], None]:
        """From now on little of what the allocator holds lies idle between tensors; returns an undo.

        CUDA's segments grow, and a CPU's large tensors have maps of their own. Elsewhere nothing is changed, nor where
        `fixed_segments` says why not.
        """
        return lambda: None

    def expandable_refused(self) -> str | None:
        """Why segments of the device's allocator cannot grow; None where they can, or where it has none."""
        return None

    def cap(self, size: int) -> Callable[[], None]:
        """From now on the allocator holds at most `size` bytes, or is out of memory; returns an undo.

        A CPU has no such allocator: there `over` tells. Elsewhere nothing is changed.
        """
        return lambda: None

    def over(self, held: Callable[[], int]) -> int:
        """By how many bytes a process that holds `held()` in RAM is beyond what it may; 0 where nobody has said that.

        There it is not asked either.
        """
        return 0

    def release_cache(self) -> None:  # noqa: B027
        """Gives memory that the allocator keeps for later back to the driver."""

    def check_history(self) -> None:
        """InputError where the device's allocator keeps no history."""
        raise InputError(f"an allocator snapshot needs a CUDA device: {self.name} keeps no allocation history")

    def record_history(self) -> None:
        """Starts recording allocations for `write_snapshot`."""
        self.check_history()

    def write_snapshot(self, path: Path) -> None:
        """Writes the recorded history to `path`, for https://pytorch.org/memory_viz, and stops recording."""
        self.check_history()


class CpuDevice(Device):
    """The CPU: its memory is host memory."""

    name = kind = "cpu"
    torch_device = torch.device("cpu")
    separate = False
    _most: int | None = None  # bytes of RAM that the process may hold

    def grow_segments(self) -> Callable[[], None]:
        return own_maps()

    def cap(self, size: int) -> Callable[[], None]:
        self._most = size
        return lambda: setattr(self, "_most", None)

    def over(self, held: Callable[[], int]) -> int:
        return max(held() - self._most, 0) if self._most is not None else 0

    def release_cache(self) -> None:
        trim_heap()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def total_bytes(self) -> int:
        return ram_bytes()

    def free_bytes(self) -> int:
        return ram_free()


class LoopbackDevice(Device):
    """A card played by the CPU: its "device memory" is host memory too, but counted apart and really copied to.

    Everything that offloading does, it does here as on a card (copies, evictions, order, bytes), on any machine.
    """

    name = kind = "loopback"
    torch_device = torch.device("cpu")
    separate = True

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.preserve_format)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.preserve_format)

    def total_bytes(self) -> int:
        return ram_bytes()

    def free_bytes(self) -> int:
        return ram_free()


def ram_bytes() -> int:
    """RAM that this process may use: the machine's, or its control group's limit where that is less."""
    return ram_limit() or psutil.virtual_memory().total


def ram_limit() -> int | None:
    """The least limit of the control groups that this process is in; None where none is less than the RAM."""
    least = min((limit for limit, _ in _limits()), default=None)
    return least if least is not None and least < psutil.virtual_memory().total else None


def ram_free() -> int:
    """RAM that this process could still take without swapping, or being killed at a control group's limit."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())]))


def pinnable_bytes() -> int:
    """Bytes that CUDA could page-lock now, at most. Without a card there is nothing to page-lock for: 0.

    On Linux the driver locks pages by its own means: RLIMIT_MEMLOCK binds mlock() only, and what is locked is RAM
    that is taken (of the control group, too), so the bound is the RAM that is free. Windows lets the driver have
    about half of the RAM (ComfyUI's model_management.py stays at 40 % for it). On WSL, "pinned system memory
    availability for applications is limited" (NVIDIA's CUDA on WSL guide) without a number: half is the bound there
    too, and in containers 0.5 to 1 GB has been seen (microsoft/WSL#14078, NVIDIA/nvidia-docker#1725). So whoever
    page-locks must be ready for a refusal.
    """
    return min(ram_free(), ram_bytes() // 2) if by_windows() else ram_free()


def by_windows() -> bool:
    """Whether the driver is that of Windows, or of WSL."""
    return platform.system() == "Windows" or "microsoft" in platform.release().lower()


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that this process is in and that has a limit.

    Cached pages of files count as unused: the kernel drops them before it refuses memory.
    """
    for folder in _groups():
        for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            try:
                most, taken = (folder / f"memory.{limit}").read_text(), (folder / f"memory.{used}").read_text()
                kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                prefix = "total_" if "total_cache" in kept else ""  # version 1 counts the groups inside apart
                files = sum(int(kept.get(f"{prefix}{age}_file", 0)) for age in ("active", "inactive"))
                yield int(most), max(0, int(taken) - files)
            except (OSError, ValueError):  # another version's file, or "max": no limit
                continue


def _groups() -> Iterator[Path]:
    """The folders of this process's memory control groups, of version 2 and of version 1, and of those around them.

    In a container the group's path is often that outside, and what is mounted is the group itself: the folders that
    do not exist are passed over, and the last is always there.
    """
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    paths = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines)}
    for root, kind in ((GROUPS, ""), (GROUPS / "memory", "memory")):
        own = Path(paths.get(kind, "/").lstrip("/"))
        yield from (root / path for path in (own, *own.parents))
