"""Device names → devices, and this computer → Machine."""

from __future__ import annotations

import os

import torch

from tightfit.devices.cuda import CudaDevice, cuda_count
from tightfit.devices.seam import CpuDevice, Device, LoopbackDevice, ram_bytes
from tightfit.errors import InputError, unknown_name
from tightfit.records import Accelerator, Machine

__all__ = ["choose_device", "find_machine"]


def choose_device(name: str | torch.device | Device | None = None) -> Device:
    """The device called `name`: "cpu", "cuda", "cuda:1", "loopback", "pretend:0"; None: a card, else the CPU."""
    if isinstance(name, Device):
        return name
    cards = cuda_count()
    if name is None:
        return CudaDevice() if cards else CpuDevice()
    kind, _, index = str(name).partition(":")
    match kind:
        case "cpu":
            return CpuDevice()
        case "loopback":
            return LoopbackDevice()
        case "pretend":
            from tightfit.devices.pretend import PretendDevice  # only where it is asked for

            return PretendDevice(int(index or 0) if (index or "0").isdecimal() else -1)
        case "cuda" if index in ("", *map(str, range(cards))) and cards:
            return CudaDevice(int(index or 0))
        case "cuda":
            raise InputError(f"no such device: {name}; this computer has {cards} CUDA cards", cards=cards)
    raise InputError(unknown_name("device", kind, ("cpu", "cuda", "loopback", "pretend")), name=str(name))


def find_machine() -> Machine:
    """This computer's devices, RAM and cores; rates are measured elsewhere."""
    cards = [CudaDevice(index) for index in range(cuda_count())]
    devices: list[Device] = [*cards] or [CpuDevice()]
    accelerators = tuple(Accelerator(name=d.name, kind=d.kind, bytes=d.total_bytes()) for d in devices)
    return Machine(accelerators=accelerators, ram=ram_bytes(), cores=os.cpu_count() or 1)
