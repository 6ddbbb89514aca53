"""CUDA cards as devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tightfit.catalog.cuda import PAGE_TAIL
from tightfit.devices.beside import copy_beside
from tightfit.devices.copy_stream import CopyStream, CudaCopyStream
from tightfit.devices.cuda_support import mapping_refused
from tightfit.devices.device import Device, Multiprocessors
from tightfit.devices.memory import is_out_of_memory
from tightfit.devices.ram import by_windows, pinnable_bytes

__all__ = ["CudaDevice", "current_cuda", "release_unused"]

SMALL = 2**20  # bytes: the largest request that torch serves from its smallest segments
TRIES = 64  # allocations of SMALL bytes at most; a reused stream may have free segments left


def current_cuda() -> int:
    """Index of the card that "cuda" means; opens no context, and is 0 before CUDA is initialized."""
    return torch.cuda.current_device() if _initialized() else 0


def release_unused() -> None:
    """Return unused cached memory of torch's allocator to the driver, on all cards."""
    if _initialized():
        torch.cuda.empty_cache()


def _initialized() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


_SETTER = "_accelerator_setAllocatorSettings"  # of torch._C; it has no public name


def _allocator_settings() -> str:
    """The allocator settings currently in effect."""
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if told is None:  # torch 2.11
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        return str(snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])
    return told() or ""


class _Segments:
    """torch's setting expandable_segments, which is global to the process: on while any caller wants it."""

    def __init__(self) -> None:
        self._callers, self._before = 0, ""

    @property
    def on(self) -> bool:
        return bool(self._callers)

    def grow(self) -> Callable[[], None]:
        """Switch it on; existing segments keep their kind. Return an undo."""
        if not self._callers:
            self._before = _allocator_settings()
            self._set("expandable_segments:True")
        self._callers += 1
        return self._leave

    def _leave(self) -> None:
        self._callers -= 1
        if not self._callers:  # torch keeps settings whose keys are not given
            self._set("" if "expandable_segments" in self._before else "expandable_segments:False")

    def _set(self, last: str) -> None:
        getattr(torch._C, _SETTER)(",".join(filter(None, (self._before, last))))


class _Shares:
    """Memory fraction of each card that this process may use: the minimum of the user's own and all caps in force."""

    def __init__(self) -> None:
        self._caps: dict[int, list[float]] = {}
        self._before: dict[int, float] = {}  # the user's own fraction by card index, where there is a cap

    def now(self, device: torch.device) -> float:
        told = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if told is not None:
            return float(told(device))
        return min(self._caps.get(device.index, ()), default=1.0)

    def limit(self, device: torch.device, share: float) -> Callable[[], None]:
        caps = self._caps.setdefault(device.index, [])
        if not caps:
            self._before[device.index] = self.now(device)
        caps.append(share)
        self._set(device)

        def undo() -> None:
            caps.remove(share)
            self._set(device)

        return undo

    def _set(self, device: torch.device) -> None:
        share = min(self._before[device.index], *self._caps[device.index], 1.0)
        torch.cuda.set_per_process_memory_fraction(share, device)


_SEGMENTS, _SHARES = _Segments(), _Shares()
_FIXED: dict[int, str | None] = {}  # reason why segments are not expandable, by card index


class CudaDevice(Device):
    kind = "cuda"
    separate = True
    plain_copies_block = True
    runs_ahead = True

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")  # blocking: the host may read it at once

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def free_bytes(self) -> int:
        """Free memory according to the driver plus unused cached memory of torch's allocator, limited by its cap."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allocated = torch.cuda.memory_allocated(self.torch_device)
        unused = torch.cuda.memory_reserved(self.torch_device) - allocated
        return max(min(free + unused, int(_SHARES.now(self.torch_device) * total) - allocated), 0)

    def product_name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def compute_capability(self) -> str | None:
        """None on ROCm, whose numbers belong to other architectures."""
        if torch.version.hip:
            return None
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return f"{major}.{minor}"

    def multiprocessors(self) -> Multiprocessors | None:
        """None where torch does not say, and on ROCm, for whose cards there are no published terms."""
        told = torch.cuda.get_device_properties(self.torch_device)
        kilohertz, cache_bytes = getattr(told, "clock_rate", 0), getattr(told, "L2_cache_size", 0)
        if torch.version.hip or not kilohertz or not cache_bytes:
            return None
        return Multiprocessors(told.multi_processor_count, 1000.0 * kilohertz, cache_bytes)

    def has_flash(self) -> bool:
        told = getattr(torch.backends.cuda, "is_flash_attention_available", None)
        return told is None or bool(told())

    def copy_stream(self) -> CopyStream:
        return CudaCopyStream(self.torch_device)

    def copy_beside(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        return copy_beside(tensor, target)

    def pinnable(self) -> int:
        return pinnable_bytes()

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        """Register the memory in place: torch's own pinned allocator would round its size up to a power of two."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, size = buffer.data_ptr(), buffer.nbytes
        with torch.cuda.device(self.torch_device):
            if int(runtime.cudaHostRegister(address, size, 0)) != 0:
                self._forget_error()
                return None

        def unlock() -> None:
            torch.cuda.synchronize(self.torch_device)
            runtime.cudaHostUnregister(address)

        return unlock

    def _forget_error(self) -> None:
        """Clear the error of a refused call: CUDA keeps it until the last error is read, as each kernel launch does."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device).add_(1)

    def pinned(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return super().pinned(size)

    def allocated_bytes(self) -> int:
        return self._allocated("current")

    def peak_bytes(self) -> int:
        return self._allocated("peak")

    def _allocated(self, figure: str) -> int:
        """Return one allocator statistic; torch's own functions flatten all of them first, which takes 70 us."""
        told = getattr(torch._C, "_cuda_memoryStats", None)
        if told is None or not _initialized():
            return int(torch.cuda.memory_stats(self.torch_device).get(f"allocated_bytes.all.{figure}", 0))
        return int(told(self.torch_device.index)["allocated_bytes"]["all"][figure])

    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds by the card's own clock: events before and after `work`, on the current stream."""
        with torch.cuda.device(self.torch_device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.synchronize()
            begin.record()
            work()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def use_expandable_segments(self) -> Callable[[], None]:
        return _SEGMENTS.grow() if self.expandable_refused() is None else super().use_expandable_segments()

    def expandable_refused(self) -> str | None:
        index = self.torch_device.index
        if index not in _FIXED:
            _FIXED[index] = self._why_fixed()
        return _FIXED[index]

    def _why_fixed(self) -> str | None:
        """Ask the driver first, then let torch try one small segment, because torch may ignore the setting."""
        if by_windows():  # torch ignores the setting on Windows; on WSL some drivers fail at once, others later
            return "expandable segments do not work on Windows"
        if not hasattr(torch._C, _SETTER):
            return f"torch {torch.__version__} has no torch._C.{_SETTER}"
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            return f"the allocator {backend} has no expandable segments"
        refused = mapping_refused(self.torch_device)
        if refused is not None:
            return f"the driver refuses expandable segments: {refused}"
        off = _SEGMENTS.grow()
        try:
            grows = self._maps_a_segment()
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            return None if is_out_of_memory(error) else f"the driver refuses expandable segments: {said}"
        finally:
            off()
        return None if grows else "torch ignores the setting expandable_segments here"

    def _maps_a_segment(self) -> bool:
        """Whether a new segment is expandable. Uses its own stream, so a failure affects no other work."""
        held: list[torch.Tensor] = []
        with torch.cuda.stream(torch.cuda.Stream(self.torch_device)):  # type: ignore[no-untyped-call]
            before = torch.cuda.memory_reserved(self.torch_device)
            while torch.cuda.memory_reserved(self.torch_device) == before and len(held) < TRIES:
                held.append(torch.empty(SMALL, dtype=torch.uint8, device=self.torch_device))
        address = held[-1].data_ptr()
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return any(each["is_expandable"] for each in segments if 0 <= address - each["address"] < each["total_size"])

    def limit_memory(self, size: int) -> Callable[[], None]:
        """Limit the process's memory fraction of the card; a lower fraction set by the user is kept.

        With expandable segments the limit is lowered by PAGE_TAIL bytes, which torch may map beyond it.
        """
        size = max(size - PAGE_TAIL, 0) if _SEGMENTS.on else size
        return _SHARES.limit(self.torch_device, min((size + 0.25) / self.total_bytes(), 1.0))  # torch < 2.15 truncates

    def release_cache(self) -> None:
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # page-locked buffers, which torch caches too

    def check_history(self) -> None:
        return None

    def record_history(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=200_000, device=self.torch_device)

    def write_snapshot(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None, device=self.torch_device)
