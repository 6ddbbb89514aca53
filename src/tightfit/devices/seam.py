"""What every device offers, and the two that need no hardware: the CPU itself and the loopback card."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

import psutil
import torch

from tightfit.errors import InputError

__all__ = ["CpuDevice", "Device", "LoopbackDevice", "ram_bytes"]


class Device(ABC):
    """One device. Host memory is the CPU's; device memory is the device's own, unless `separate` is False."""

    name: str  # "cpu", "cuda:0", "loopback"
    kind: str
    torch_device: torch.device
    separate: bool  # False: host memory is its memory, and moving weights "off the device" means nothing
    swaps_parameters = False  # True: `parameter.data` of a host parameter cannot become a tensor of this device

    @abstractmethod
    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host `tensor` in device memory, same dtype, shape and strides."""

    @abstractmethod
    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a device `tensor` in host memory, complete on return."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the device."""

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

    def synchronize(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Waits until the device has done all that it was given."""

    def now(self) -> float:
        """Seconds on the device's clock, from any start."""
        return time.perf_counter()

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

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def total_bytes(self) -> int:
        return ram_bytes()


class LoopbackDevice(Device):
    """A card played by the CPU: its "device memory" is host memory too, but counted apart and really copied to.

    Everything that offloading does, it does here as on a card (copies, evictions, order, bytes), on any machine.
    """

    name = kind = "loopback"
    torch_device = torch.device("cpu")
    separate = True

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.preserve_format)

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.preserve_format)

    def total_bytes(self) -> int:
        return ram_bytes()


def ram_bytes() -> int:
    """RAM that this process may use: the machine's, or its control group's limit where that is less."""
    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(file):
            text = Path(file).read_text().strip()
            limits += [int(text)] if text.isdigit() else []
    return min(limits)
