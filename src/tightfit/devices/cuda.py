"""CUDA cards. The only file that calls `torch.cuda`."""

from __future__ import annotations

from pathlib import Path

import torch

from tightfit.devices.seam import Device

__all__ = ["CudaDevice", "cuda_count"]


def cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class CudaDevice(Device):
    kind = "cuda"
    separate = True

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device, non_blocking=True)

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")  # waits: the host may read it at once

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

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

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def check_history(self) -> None:
        return None

    def record_history(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=200_000, device=self.torch_device)

    def write_snapshot(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None, device=self.torch_device)
