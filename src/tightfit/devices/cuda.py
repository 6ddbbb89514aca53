"""CUDA cards. The only file that calls `torch.cuda`."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tightfit.devices.lane import Arrival, Lane
from tightfit.devices.seam import Device, pinnable_bytes

__all__ = ["CudaDevice", "cuda_count", "unusable_card", "usable_cards"]

ELSEWHERE = "https://pytorch.org/get-started/locally/"  # where torch for other CUDA versions is


def cuda_count() -> int:
    """The number of cards that torch can compute on."""
    return len(usable_cards())


def usable_cards() -> tuple[int, ...]:
    """The indices of the cards that torch can compute on."""
    with warnings.catch_warnings(action="ignore"):  # torch's own warning of what `unusable_card` says
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(index for index in range(count) if _missing_kernels(index) is None)


def unusable_card() -> str | None:
    """Why torch cannot compute on the card that is there, and what to do. None if it can, or if there is no card."""
    if torch.version.cuda is None or usable_cards():
        return None
    return _missing_kernels(0) if torch.cuda.is_available() else _driver_error()


def _driver_error() -> str | None:
    """Why CUDA does not start, though a driver is there: mostly it is older than torch's CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        if reason.startswith(("Found no NVIDIA driver", "No CUDA GPUs are available")):
            return None
        if found := re.search(r"too old \(found version (\d+)\)", reason):
            there = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
            return (
                f"the NVIDIA driver is too old for torch {torch.__version__}: it supports CUDA {there}, torch needs "
                f"{torch.version.cuda}. Update the driver, or install torch for CUDA {there} or older: {ELSEWHERE}"
            )
        return f"torch {torch.__version__} cannot use the NVIDIA card: {reason}"
    return None


def _missing_kernels(index: int) -> str | None:
    """Why this torch has no kernels for card `index`; None if it has."""
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in torch.cuda.get_arch_list()]
    capability = torch.cuda.get_device_capability(index)
    made_for = [(each[1], (int(each[2]), int(each[3]))) for each in built if each]
    if not made_for or any(_runs(kind, version, capability) for kind, version in made_for):
        return None
    versions = ", ".join(f"{major}.{minor}" for _, (major, minor) in made_for)
    major, minor = capability
    return (
        f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(index)}, which has compute "
        f"capability {major}.{minor}: only for {versions}. Install torch for an older CUDA version: {ELSEWHERE}"
    )


def _runs(kind: str, version: tuple[int, int], capability: tuple[int, int]) -> bool:
    """Whether a card of this capability runs what was compiled for `version`: PTX ("compute") also on later ones."""
    return version <= capability and (kind == "compute" or version[0] == capability[0])


class CudaDevice(Device):
    kind = "cuda"
    separate = True
    plain_copies_block = True
    runs_ahead = True

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device, non_blocking=True)

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")  # waits: the host may read it at once

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def free_bytes(self) -> int:
        """What the driver has left, and what this process's allocator keeps without a tensor in it."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free + torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)

    def title(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def compute_capability(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return f"{major}.{minor}"

    def lane(self) -> Lane:
        return _CudaLane(self.torch_device)

    def pinnable(self) -> int:
        return pinnable_bytes()

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        """Registers memory as it is: torch's own pinned allocator would round it up to a power of two."""
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
        """CUDA keeps the error of a refused call, and the next kernel that looks for its own would find it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device).add_(1)
            self.synchronize()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def seconds(self, work: Callable[[], object]) -> float:
        """By the card's own clock: events before and after `work`, on the stream that it is given to."""
        with torch.cuda.device(self.torch_device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.synchronize()
            begin.record()
            work()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def grow_segments(self) -> Callable[[], None]:
        """By torch's own setting, which is the process's; segments that are there already stay as they are."""
        before = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (before, "expandable_segments:True"))))
        return lambda: torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")

    def cap(self, size: int) -> Callable[[], None]:
        """By the process's share of the card, which torch cannot tell: what somebody had set before is lost."""
        share = min((size + 1) / self.total_bytes(), 1.0)  # it is rounded down to bytes
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    def release_cache(self) -> None:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # page-locked buffers, which torch keeps for later too

    def check_history(self) -> None:
        return None

    def record_history(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=200_000, device=self.torch_device)

    def write_snapshot(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None, device=self.torch_device)


class _CudaLane(Lane):
    """A stream of its own, for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Arrival:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return _CudaArrival(self._device, self._stream.record_event())

    def follow(self, arrival: Arrival) -> None:
        assert isinstance(arrival, _CudaArrival)
        self._stream.wait_event(arrival.event)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()


class _CudaArrival(Arrival):
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self.event = device, event

    def settle(self) -> float:
        torch.cuda.current_stream(self._device).wait_event(self.event)
        return 0.0

    def land(self) -> None:
        self.event.synchronize()
