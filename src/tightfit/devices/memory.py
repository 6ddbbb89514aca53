"""Host memory whose bytes are exact: a map of its own for each arena, given back whole when nobody uses it any more.

The heap cannot promise that: what is freed in it stays with the process wherever something small still lives nearby.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil
import torch

from tightfit.errors import InputError, RunError
from tightfit.units import format_bytes

__all__ = [
    "CACHE_LINE",
    "OWN_MEMORY",
    "RamExceeded",
    "arena",
    "copy_alike",
    "is_shared",
    "move_into",
    "own_maps",
    "own_room",
    "resident_bytes",
    "trim_heap",
]

CACHE_LINE = 64  # bytes, of which torch's addresses are multiples
OWN_MEMORY = 2**20  # bytes of a tensor for which a map of its own is worth it
HUGE_PAGE = 2 * 2**20  # of x86-64, and of ARM with pages of 4 KiB
LARGEST_PLUG = 2**30  # bytes
RELEASED_AT_ONCE = 32 * 2**20  # bytes
ALONE = 2  # who holds a storage that one tensor has: the tensor, and whoever asks
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
_USUAL_LIMITS = {_TRIM_THRESHOLD: 64 * 2**20, _MMAP_THRESHOLD: 32 * 2**20}  # up to which glibc raises them by itself


class RamExceeded(torch.OutOfMemoryError):
    """This process `held` more bytes of RAM than it may. Nobody refused them."""

    def __init__(self, held: int) -> None:
        super().__init__(f"this process held {format_bytes(held)} of RAM, more than it may")
        self.held = held


def arena(size: int) -> torch.Tensor:
    """`size` bytes of host memory: uint8, shape (size,), zero, and no page of it taken before it is touched.

    It starts at a multiple of 2 MiB where it is at least that long, else at a multiple of 4096. The memory goes back
    to the system when the last tensor dies that shares its storage. On Linux its whole huge pages are advised to be
    such; the rest, less than 2 MiB, is not, so it never takes more than `size`, rounded up to a small page.

    InputError where `size` is negative, RunError where the system has no room for it.
    """
    if size < 0:
        raise InputError(f"an arena needs 0 bytes or more, not {size}", size=size)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    large = size >= HUGE_PAGE
    try:
        room = _anonymous(size + HUGE_PAGE if large else size)
    except OSError as error:
        raise RunError(
            f"the system refuses an arena of {size} bytes ({format_bytes(size)}): {error.strerror}", size=size
        ) from error
    lead = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % HUGE_PAGE if large else 0
    if large and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            room.madvise(mmap.MADV_HUGEPAGE, lead, size // HUGE_PAGE * HUGE_PAGE)
    return torch.frombuffer(room, dtype=torch.uint8, offset=lead, count=size)  # the storage keeps `room`, nobody else


def own_room(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A dense host tensor with anything in it, in an arena of its own where it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < OWN_MEMORY:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return arena(size).view(dtype).as_strided(shape, strides)


def move_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """`tensor` lies in `target`, of the same layout, from now on; what it lay in goes while it is copied.

    So a large tensor is not there twice, if nobody else can see its memory: no other tensor, and no other library.
    Otherwise it is copied first. Whoever interrupts this finds all its numbers.
    """
    if tensor.nbytes < RELEASED_AT_ONCE or not _is_its_own(tensor):
        tensor.data = target.copy_(tensor.data)
        return
    to, old, begin, copied = _flat_bytes(target), _flat_bytes(tensor), tensor.data_ptr(), 0
    try:
        for start in range(0, tensor.nbytes, RELEASED_AT_ONCE):
            end = min(start + RELEASED_AT_ONCE, tensor.nbytes)
            to[start:end].copy_(old[start:end])
            low = -(-(begin + start) // mmap.PAGESIZE) * mmap.PAGESIZE
            high = (begin + end) // mmap.PAGESIZE * mmap.PAGESIZE
            copied = end
            ctypes.CDLL(None).madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), mmap.MADV_DONTNEED)
        tensor.data = target
    except BaseException:
        old[:copied].copy_(to[:copied])
        raise


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors have the same memory: it would not be freed, and might be written into meanwhile."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > ALONE


def _is_its_own(tensor: torch.Tensor) -> bool:
    """Whether its memory is from torch's own allocator (`resizable` says so), and only this tensor lies in it."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.untyped_storage().is_shared():
        return False
    if not tensor.untyped_storage().resizable():
        return False
    return not tensor.is_pinned() and _holders(tensor) == _holders(torch.empty(1))


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a storage, and its Python object, which is the same for all who ask for it."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the dense `tensor`, in their order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def trim_heap() -> None:
    """Gives the system back what is free in this process's heap, where its C library can do that (glibc)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows has no "this process"
        ctypes.CDLL(None).malloc_trim(0)


def own_maps() -> Callable[[], None]:
    """From now on tensors of OWN_MEMORY bytes or more have maps of their own, which go when they do; returns an undo.

    In glibc's heap, what lies free between tensors can be a third of them (a U-Net's step on a CPU: 0.35 of 0.86 GB).
    Taking pages anew for each costs time instead. Where the C library is another, nothing is changed.
    """
    _set_limits(dict.fromkeys(_USUAL_LIMITS, OWN_MEMORY))
    trim_heap()
    plugs = _plug_holes()

    def undo() -> None:
        _set_limits(_USUAL_LIMITS)
        for plug in plugs:
            ctypes.CDLL(None).free(ctypes.c_void_p(plug))

    return undo


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes of these tensors on the CPU are in RAM: of a file that is mapped, what was read of it so far."""
    spans = sorted({(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors})
    try:
        maps = psutil.Process().memory_maps(grouped=False)
    except (AttributeError, psutil.Error):  # the system does not say
        return sum(end - begin for begin, end in spans)
    total = 0
    for each in maps:
        low, high = (int(address, 16) for address in each.addr.split("-"))
        within = sum(max(min(end, high) - max(begin, low), 0) for begin, end in spans)
        total += min(within, int(each.rss))
    return total


def _set_limits(limits: Mapping[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for parameter, size in limits.items():
            library.mallopt(parameter, size)


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2(3) tells: ten numbers. The fourth counts the maps that malloc has asked for."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _plug_holes() -> list[int]:
    """Takes the heap's free rooms that tensors of OWN_MEMORY bytes fit in, without touching their pages; where it did.

    glibc asks the system for a map only where its heap has no room, whatever M_MMAP_THRESHOLD is.
    """
    try:
        library = ctypes.CDLL(None)
        library.malloc.restype, library.mallinfo2.restype = ctypes.c_void_p, _Heap
    except (OSError, AttributeError, TypeError):  # another library, or glibc before 2.33
        return []
    plugs: list[int] = []
    size = LARGEST_PLUG
    while size >= OWN_MEMORY:
        maps = library.mallinfo2().numbers[3]
        plug = library.malloc(ctypes.c_size_t(size))
        if plug and library.mallinfo2().numbers[3] <= maps:
            plugs.append(plug)
            continue
        library.free(ctypes.c_void_p(plug))
        size //= 2
    return plugs


def _anonymous(size: int) -> mmap.mmap:
    """A private map of `size` bytes, with no file behind it; shared ones, mmap's default, get no huge pages."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def copy_alike(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the dense `tensor` on the CPU, at the same place within a cache line: multiplied, it gives the same."""
    begin = tensor.data_ptr() % CACHE_LINE
    room = torch.empty(begin + tensor.nbytes, dtype=torch.uint8)[begin:].view(tensor.dtype)
    return room.as_strided(tensor.shape, tensor.stride(), room.storage_offset()).copy_(tensor)
