"""Which CUDA cards torch can compute on, and whether their driver can map memory as expandable segments need it."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

__all__ = ["attention_support", "cuda_count", "mapping_refused", "unusable_card", "usable_cards"]


ELSEWHERE = "https://pytorch.org/get-started/locally/"  # download page of torch for other CUDA versions


def cuda_count() -> int:
    """Number of cards that torch can compute on."""
    return len(usable_cards())


def usable_cards() -> tuple[int, ...]:
    """Indices of the cards that torch can compute on."""
    with warnings.catch_warnings(action="ignore"):  # torch's own warning for what `unusable_card` reports
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(index for index in range(count) if _missing_kernels(index) is None)


def unusable_card() -> str | None:
    """Why torch cannot compute on the card present, and what to do; None if it can, or if there is no card."""
    if torch.version.cuda is None or usable_cards():
        return None
    return _missing_kernels(0) if torch.cuda.is_available() else _driver_error()


def attention_support(device: torch.device) -> tuple[tuple[int, int], bool]:
    """Return the compute capability by which attention on `device` is chosen, and whether torch has flash attention.

    (0, 0) on ROCm, whose numbers belong to other architectures; a simulated card has all kernels.
    """
    if device.type != "cuda":
        return (8, 0), True
    told = getattr(torch.backends.cuda, "is_flash_attention_available", None)
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device), told is None or bool(told())


def _driver_error() -> str | None:
    """Why CUDA does not start although a driver is present: mostly the driver is older than torch's CUDA."""
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
    """Why this torch has no kernels for card `index`; None if it has them."""
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
    """Whether a card of this capability runs code compiled for `version`; PTX ("compute") runs on later ones too."""
    return version <= capability and (kind == "compute" or version[0] == capability[0])


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
    """A driver call failed."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with error {code}")
        self.code = code


def mapping_refused(device: torch.device) -> str | None:
    """Which driver call failed, and how; None where mapping works or cannot be checked (ROCm has another driver)."""
    if torch.version.hip or torch.version.cuda is None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # makes sure that the driver has a context
        try:
            return _map_one(driver, device.index)
        except _Refused as error:
            return None if error.code == OUT_OF_MEMORY else str(error)
        except AttributeError as error:  # the driver is older than this call
            return str(error)


def _map_one(driver: Any, index: int) -> str | None:
    """Reserve, create, map and free one small piece of memory; return why this card cannot, or None."""
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
