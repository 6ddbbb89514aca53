"""Host memory of exact size: one memory map for each arena, returned to the system when its last user is gone.

The heap cannot guarantee that: freed heap memory stays with the process while a small allocation nearby is alive.

Also recognizes errors that mean that a device is out of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import re
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
    "copy_with_alignment",
    "empty_in_arena",
    "is_out_of_memory",
    "is_shared",
    "map_large_tensors",
    "move_into",
    "resident_bytes",
    "trim_heap",
]


CACHE_LINE = 64  # bytes; torch's addresses are multiples of it
OWN_MEMORY = 2**20  # bytes from which a tensor gets a memory map of its own
HUGE_PAGE = 2 * 2**20  # bytes, on x86-64, and on ARM with pages of 4 KiB
LARGEST_PLUG = 2**30  # bytes: the largest heap block that `_plug_holes` tries
RELEASED_AT_ONCE = 32 * 2**20  # bytes that `move_into` copies and releases per step
ALONE = 2  # use count of a storage with one tensor: the tensor, and the caller that asks
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
_USUAL_LIMITS = {_TRIM_THRESHOLD: 64 * 2**20, _MMAP_THRESHOLD: 32 * 2**20}  # glibc raises them up to these


class RamExceeded(torch.OutOfMemoryError):
    """This process held more bytes of RAM (`held`) than its cap, although the system did not refuse them."""

    def __init__(self, held: int) -> None:
        super().__init__(f"this process held {format_bytes(held)} of RAM, more than it may")
        self.held = held


def arena(size: int) -> torch.Tensor:
    """Allocate `size` bytes of host memory: uint8, shape (size,), zeros; pages are committed on first use.

    The address is a multiple of 2 MiB from that size on, else a multiple of 4096. The memory is returned to the system
    when the last tensor that shares its storage is freed. On Linux its whole huge pages get MADV_HUGEPAGE; the rest,
    less than 2 MiB, does not, so it never takes more than `size`, rounded up to a small page.

    InputError where `size` is negative, RunError where the system refuses the memory.
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
    return torch.frombuffer(room, dtype=torch.uint8, offset=lead, count=size)  # only the storage keeps `room` alive


def empty_in_arena(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized dense host tensor, in its own arena from OWN_MEMORY bytes on."""
    size = math.prod(shape) * dtype.itemsize
    if size < OWN_MEMORY:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return arena(size).view(dtype).as_strided(shape, strides)


def move_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Move the data of `tensor` into `target`, of the same layout; the old memory is released while it is copied.

    So a large tensor is not in memory twice, if its memory is not shared with another tensor or library. Otherwise it
    is copied as a whole first. If interrupted, `tensor` keeps all its values.
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
    """Whether other tensors share the memory: it would not be freed, and might be written to meanwhile."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > ALONE


def _is_its_own(tensor: torch.Tensor) -> bool:
    """Whether the memory is from torch's own allocator (then it is `resizable`), and only this tensor uses it."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.untyped_storage().is_shared():
        return False
    if not tensor.untyped_storage().resizable():
        return False
    return not tensor.is_pinned() and _holders(tensor) == _holders(torch.empty(1))


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Use count of the storage, and reference count of its Python object, which all callers share."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the dense `tensor` in memory order, a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def trim_heap() -> None:
    """Return free memory of this process's heap to the system, where the C library supports it (glibc)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows does not support CDLL(None)
        ctypes.CDLL(None).malloc_trim(0)


def map_large_tensors() -> Callable[[], None]:
    """Give new tensors of OWN_MEMORY bytes or more their own memory maps, freed with the tensors; return an undo.

    In glibc's heap, free memory between tensors can be a third of their bytes (a U-Net's step on a CPU: 0.35 of 0.86
    GB). Committing new pages for each tensor costs time instead. With another C library nothing is changed.
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
    """Bytes of these CPU tensors that are in RAM and cannot be dropped: of a file's memory map, what was changed."""
    spans = sorted({(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors})
    try:
        maps = psutil.Process().memory_maps(grouped=False)
    except (AttributeError, psutil.Error):  # the system does not report them
        return sum(end - begin for begin, end in spans)
    total = 0
    for each in maps:
        low, high = (int(address, 16) for address in each.addr.split("-"))
        within = sum(max(min(end, high) - max(begin, low), 0) for begin, end in spans)
        total += min(within, int(each.anonymous))
    return total


def _set_limits(limits: Mapping[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for parameter, size in limits.items():
            library.mallopt(parameter, size)


class _Heap(ctypes.Structure):
    """The result of glibc's mallinfo2(3): ten numbers. The fourth, hblks, counts the maps that malloc has requested."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _plug_holes() -> list[int]:
    """Allocate the free heap blocks of OWN_MEMORY bytes or more, without touching their pages; return their addresses.

    glibc requests a map from the system only where its heap has no free block, whatever M_MMAP_THRESHOLD is.
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
    """A private map of `size` bytes without a file; shared maps, the default of mmap, get no huge pages."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def copy_with_alignment(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the dense CPU `tensor` to the same offset within a cache line, so that products give equal results."""
    begin = tensor.data_ptr() % CACHE_LINE
    room = torch.empty(begin + tensor.nbytes, dtype=torch.uint8)[begin:].view(tensor.dtype)
    return room.as_strided(tensor.shape, tensor.stride(), room.storage_offset()).copy_(tensor)


# Memory outside of torch's allocator: the driver's, for kernels that are loaded on first use, and that of cuBLAS and
# cuDNN. They cannot create their handles without memory either, and then report that they are not initialized.
_SAYS = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory"
    r"|\[(CUDA|HIP)\]: out of memory"  # Triton
    r"|(CUBLAS|HIPBLAS|CUDNN|MIOPEN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|(CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"
    r"|API call failed at .*aoti_runner",  # AOTInductor does not report its reason; its inputs were checked before
    re.DOTALL,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a device is out of memory, or is a RamExceeded.

    torch.OutOfMemoryError is raised by torch's allocator only; all others are RuntimeErrors, recognized by message.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS.search(str(error)) is not None
