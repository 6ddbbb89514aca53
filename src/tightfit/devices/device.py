"""The interface of every device, and the two devices that need no hardware: the CPU and the loopback device."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tightfit.devices.copy_stream import CopyStream, HostCopyStream
from tightfit.devices.memory import arena, map_large_tensors, trim_heap
from tightfit.devices.ram import group_memory, ram_bytes, ram_free
from tightfit.errors import InputError
from tightfit.schema.machine import GROUP_SPARE

__all__ = ["CpuDevice", "Device", "LoopbackDevice", "Multiprocessors"]


class Multiprocessors(NamedTuple):
    """Of a card, as its driver describes them."""

    number: int
    clock: float  # nominal, in hertz
    cache_bytes: int  # of the second-level cache, which they share


class Device(ABC):
    """One device. Host memory is the CPU's; device memory is the device's own, unless `separate` is False."""

    name: str  # "cpu", "cuda:0", "loopback"
    kind: str
    torch_device: torch.device
    separate: bool  # False: it computes in host memory, so there is nothing to offload
    plain_copies_block = False  # whether copies from memory that is not page-locked block the host
    runs_ahead = False  # whether the device executes asynchronously, so `now()` may precede its completion
    takes_threads = True  # whether copies may be sent from any thread
    call_lock: AbstractContextManager[Any] | None = None  # held by each call; None: pipelines do not share one
    swaps_parameters = False  # True: `parameter.data` of a host parameter cannot become a tensor of this device

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host `tensor` in device memory, same dtype, shape and strides."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a device `tensor` in host memory, complete on return."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Total memory of the device in bytes."""

    def free_bytes(self) -> int:
        """Bytes of device memory that new tensors could take now."""
        return self.total_bytes() - (self.allocated_bytes() or 0)

    def product_name(self) -> str | None:
        """Product name of the device; None where it is not known."""
        return None

    def compute_capability(self) -> str | None:
        """Compute capability of a CUDA card, e.g. "8.9"; None for other devices."""
        return None

    def multiprocessors(self) -> Multiprocessors | None:
        """The multiprocessors of a card; None for other devices, and where they are not known."""
        return None

    def has_flash(self) -> bool:
        """Whether torch was compiled with flash attention for such a device."""
        return True

    def copy_stream(self) -> CopyStream:
        """Return a new stream for copies to or from the device."""
        return HostCopyStream()

    def copy_beside(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        """Return a copy of `tensor`, of this device, on `target`, another device of its kind.

        Work submitted later to this device does not wait for the copy; that of the other one does. A tensor whose
        memory has gaps is copied here first.
        """
        return tensor.to(target, non_blocking=True)

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of device memory, uninitialized, as uint8 of shape (size,).

        Where that is host memory, it is aligned such that whole disk sectors can be read into it directly.
        """
        if self.torch_device.type == "cpu":
            return arena(size)
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def allocate_host(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of host memory for device data, as uint8 of shape (size,); may be on meta."""
        return arena(size)

    def pinnable(self) -> int:
        """Bytes of host memory that could be page-locked for copies to this device."""
        return 0

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        """Page-lock existing host memory; return a function that unlocks it, or None where that is refused."""
        return None

    def pinned(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of host memory of the kind that copies to and from the device fastest."""
        return arena(size)

    def allocated_bytes(self) -> int | None:
        """Bytes of live tensors according to the device's allocator; None where it does not count."""
        return None

    def peak_bytes(self) -> int | None:
        """Maximum of `allocated_bytes` since `reset_peak`; None where the allocator does not count."""
        return None

    def peak_reserved_bytes(self) -> int:
        """Peak bytes reserved by the device's allocator, used or not, since `reset_peak`; 0 where there is none."""
        return 0

    def reset_peak(self) -> None:
        return None

    def saved_tensors(self) -> AbstractContextManager[Any]:
        """Return a context for forward passes with gradients enabled, in which autograd saves tensors."""
        return nullcontext()

    def charge_layer_overhead(self) -> None:  # noqa: B027 - a real host spends the time itself
        """Called before a layer with loaded weights runs: a simulated device adds the host time that this takes."""

    def charge_transfer_overhead(self) -> None:  # noqa: B027
        """Called before streamed weights are sent: a simulated device adds the host time that this takes."""

    def synchronize(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Block the host until the device has done all submitted work."""

    def now(self) -> float:
        """Seconds on the device's clock, from an arbitrary start."""
        return time.perf_counter()

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that the device takes for all work submitted by `work()`, from idle to idle."""
        self.synchronize()
        start = self.now()
        work()
        self.synchronize()
        return self.now() - start

    def use_expandable_segments(self) -> Callable[[], None]:
        """Make the allocator keep little unused memory between tensors from now on; return an undo.

        On CUDA this switches on expandable segments, on a CPU large tensors get their own memory maps. Other devices
        are unchanged, as are those for which `expandable_refused` returns a reason.
        """
        return lambda: None

    def expandable_refused(self) -> str | None:
        """Why the device's allocator has no expandable segments; None where it has, or where there is no allocator."""
        return None

    def limit_memory(self, size: int) -> Callable[[], None]:
        """Limit the allocator to `size` bytes from now on, beyond which it is out of memory; return an undo.

        A CPU has no such allocator: there `over` reports the excess. Other devices are unchanged.
        """
        return lambda: None

    def excess_bytes(self, held: Callable[[], int]) -> int:
        """Bytes by which a process that holds `held()` bytes of RAM exceeds what it may hold; 0 without a limit.

        Without a limit `held` is not called.
        """
        return 0

    def release_cache(self) -> None:  # noqa: B027
        """Return unused cached memory of the allocator to the driver."""

    def check_history(self) -> None:
        """Raise InputError where the device's allocator keeps no history."""
        raise InputError(f"an allocator snapshot needs a CUDA device: {self.name} keeps no allocation history")

    def record_history(self) -> None:
        """Start recording allocations for `write_snapshot`; InputError where the allocator keeps no history."""
        self.check_history()

    def write_snapshot(self, path: Path) -> None:
        """Write the recorded history to `path`, for https://pytorch.org/memory_viz, and stop recording."""
        self.check_history()


class CpuDevice(Device):
    """The CPU: its memory is host memory."""

    name = kind = "cpu"
    torch_device = torch.device("cpu")
    separate = False
    _most: int | None = None  # bytes of RAM that the process may hold; None: no cap

    def use_expandable_segments(self) -> Callable[[], None]:
        return map_large_tensors()

    def limit_memory(self, size: int) -> Callable[[], None]:
        self._most = size
        return lambda: setattr(self, "_most", None)

    def excess_bytes(self, held: Callable[[], int]) -> int:
        group = group_memory()
        if group is None and self._most is None:
            return 0
        now = held()
        beyond_cap = now - self._most if self._most is not None else 0
        return max(beyond_cap, GROUP_SPARE - group.free if group is not None else 0, 0)

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
    """A card emulated by the CPU: its "device memory" is host memory too, but counted separately and really copied to.

    Offloading behaves as on a card (copies, evictions, order, bytes), on any machine.
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
