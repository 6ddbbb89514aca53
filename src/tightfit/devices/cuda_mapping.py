"""Whether the CUDA driver maps memory as torch's expandable segments need it, without torch's allocator.

Where a call of the driver fails half way, the segment of torch 2.12 is left in a state in which all later calls of its
allocator fail, until the process ends. So the driver is asked for one small piece first, in the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

__all__ = ["mapping_refused"]

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
MAPS_MEMORY, MAPS_FOR_RDMA = 102, 110  # CU_DEVICE_ATTRIBUTE_…: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, GPU_DIRECT_RDMA_…
PINNED, FILE_DESCRIPTOR, ON_A_DEVICE, READ_AND_WRITE = 1, 1, 1, 3
TAKEN = 2 * 2**20  # bytes: a small page of torch's segments


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("for_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Refused(Exception):
    """A call of the driver did not succeed."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with error {code}")
        self.code = code


def mapping_refused(device: torch.device) -> str | None:
    """Which call the driver refuses, and how; None where it maps memory, or cannot be asked (ROCm has another)."""
    if torch.version.hip or torch.version.cuda is None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # from here on the driver has a context
        try:
            return _map_one(driver, device.index)
        except _Refused as error:
            return None if error.code == OUT_OF_MEMORY else str(error)
        except AttributeError as error:  # a driver from before there was such a call
            return str(error)


def _map_one(driver: Any, index: int) -> str | None:
    """Takes, maps and gives back one small piece of memory; returns why that is not possible on this card."""
    ask = _caller(driver)
    attribute = ctypes.c_int()
    ask("cuDeviceGetAttribute", ctypes.byref(attribute), ctypes.c_int(MAPS_MEMORY), ctypes.c_int(index))
    if not attribute.value:
        return "the card has no virtual memory management"
    ask("cuDeviceGetAttribute", ctypes.byref(attribute), ctypes.c_int(MAPS_FOR_RDMA), ctypes.c_int(index))
    place = _Location(ON_A_DEVICE, index)
    how = _Properties(PINNED, FILE_DESCRIPTOR, place, None, _Flags(0, int(attribute.value != 0), 0))
    size, address, handle = ctypes.c_size_t(TAKEN), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    nothing, at = ctypes.c_ulonglong(0), ctypes.byref
    with ExitStack() as undo:
        ask("cuMemAddressReserve", at(address), size, ctypes.c_size_t(0), nothing, nothing)
        undo.callback(ask, "cuMemAddressFree", address, size)
        ask("cuMemCreate", at(handle), size, at(how), nothing)
        undo.callback(ask, "cuMemRelease", handle)
        ask("cuMemMap", address, size, ctypes.c_size_t(0), handle, nothing)
        undo.callback(ask, "cuMemUnmap", address, size)
        ask("cuMemSetAccess", address, size, at(_Access(place, READ_AND_WRITE)), ctypes.c_size_t(1))
    return None


def _caller(driver: Any) -> Callable[..., None]:
    def ask(call: str, *args: Any) -> None:
        code = int(getattr(driver, call)(*args))
        if code:
            raise _Refused(call, code)

    return ask
