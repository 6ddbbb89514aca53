"""Device names → devices, and this computer → Machine."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import torch

from tightfit.devices.cuda import CudaDevice, current_cuda
from tightfit.devices.cuda_support import unusable_card, usable_cards
from tightfit.devices.device import CpuDevice, Device, LoopbackDevice
from tightfit.devices.ram import held_bytes, pinnable_bytes, ram_bytes, ram_free, ram_limit
from tightfit.errors import InputError, unknown_name
from tightfit.schema.machine import Accelerator, Machine

__all__ = ["KINDS", "choose_device", "find_machine", "processor", "usable_cores"]

logger = logging.getLogger("tightfit")
KINDS = ("cpu", "cuda", "loopback", "simulated", "privateuseone")  # of which the last is torch's name of simulated
_told: set[str] = set()  # reasons why cards are not used that were already logged


def choose_device(name: str | torch.device | Device | None = None) -> Device:
    """Return the device called `name`: "cpu", "cuda", "cuda:1", "loopback", "simulated:0"; None means "cuda,cpu".

    Of several names separated by commas, return the first that is available and that torch can use. "cuda" without an
    index is torch's current card. InputError for an unknown name or a missing device.
    """
    if isinstance(name, Device):
        return name
    *preferred, last = names = str("cuda,cpu" if name is None else name).split(",")
    for each in names:
        if each.partition(":")[0] not in KINDS:
            raise InputError(unknown_name("device", each.partition(":")[0], KINDS[:-1]), name=each)
    for each in preferred:
        if each.partition(":")[0] != "cuda" or _card(each) is not None:
            return _device(each)
        _tell_of_unused_cards()
    return _device(last)


def _device(name: str) -> Device:
    kind, _, index = name.partition(":")
    match kind:
        case "cpu" | "loopback" if index in ("", "0"):
            return CpuDevice() if kind == "cpu" else LoopbackDevice()
        case "simulated" | "privateuseone":
            from tightfit.devices.simulated import SimulatedDevice  # imported only on demand

            return SimulatedDevice(int(index or 0) if (index or "0").isdecimal() else -1)
        case "cuda" if (card := _card(name)) is not None:
            return card
        case "cuda":
            cards, reason = len(usable_cards()), unusable_card()
            because = f"; {reason}" if reason else ""
            raise InputError(f"no such device: {name}; this computer has {cards} CUDA cards{because}", cards=cards)
    raise InputError(f"no such device: {name}; there is one {kind}", name=name)


def _card(name: str) -> CudaDevice | None:
    """Return the card called "cuda" or "cuda:1", or None if torch cannot use it."""
    index, cards = name.partition(":")[2], usable_cards()
    if not index and cards:
        return CudaDevice(current if (current := current_cuda()) in cards else cards[0])
    return CudaDevice(int(index)) if index in map(str, cards) else None


def _tell_of_unused_cards() -> None:
    """Log once which accelerator is present but not used, because running without it is slower than expected."""
    reason, other = unusable_card(), torch.accelerator.current_accelerator(check_available=True)
    if reason is None and other is not None and other.type != "cuda":
        reason = f"torch found {other.type}, which tightfit does not support"
    if reason is not None and reason not in _told:
        _told.add(reason)
        logger.warning("running without a card: %s", reason)


def find_machine() -> Machine:
    """Return this computer's devices, RAM and cores, and how much memory is free now; rates are measured elsewhere.

    Querying the free memory of a card opens a CUDA context on it, which takes some hundred MB of the card.
    """
    cards = [CudaDevice(index) for index in usable_cards()]
    if not cards:
        _tell_of_unused_cards()
    devices: list[Device] = [*cards] or [CpuDevice()]
    cpu = processor()
    return Machine(
        accelerators=tuple(_accelerator(device, device.product_name() or cpu) for device in devices),
        ram=ram_bytes(),
        ram_free=ram_free(),
        ram_used=held_bytes(),
        ram_limit=ram_limit(),
        pinnable=pinnable_bytes() if cards else 0,
        cores=usable_cores(),
        cpu=cpu,
    )


def _accelerator(device: Device, title: str | None) -> Accelerator:
    return Accelerator(
        name=device.name,
        kind=device.kind,
        bytes=device.total_bytes(),
        free=device.free_bytes(),
        allocated=device.allocated_bytes() if device.separate else None,
        expandable_refused=device.expandable_refused(),
        product_name=title,
        compute_capability=device.compute_capability(),
        flash=device.has_flash(),
    )


def usable_cores() -> int:
    """Number of cores that this process may use, where the system reports it; else all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str | None:
    """Product name of this computer's processor; None where the system does not report it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), None) or platform.processor() or platform.machine() or None
