"""Tensors on the simulated device: an address from a card's allocator, and the values or size behind it.

Such a tensor is an ordinary `torch.Tensor` whose storage points at an address that is never read. torch creates it from
a DLPack capsule for an "extension device" (kDLExtDev is PrivateUse1), with any card's index; no C++ is needed, views
share storage as usual, and parameters stay parameters. This module maps each address to its data: real bytes in host
memory, or only a size.

A tensor without values may have a known fill, a number that all its elements are equal to: HunyuanVideo 1.5 branches
on whether its image embedding is all zeros. The fill is propagated through copies and comparisons.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from tightfit.errors import RunError
from tightfit.simulator.blocks import Block
from tightfit.simulator.card import SimulatedCard

__all__ = [
    "CPU_KEYS",
    "FOLLOWED",
    "Store",
    "ViewSpec",
    "extent",
    "fill_of",
    "fits_values",
    "free_dead_tensors",
    "new_at",
    "new_tensor",
    "note_fill",
    "raise_unless_zeros_accepted",
    "store_of",
    "tensors_in",
    "valueless",
    "view",
]

SMALL = 64 * 2**10  # bytes up to which tensors keep their values with values="shapes" …
SMALL_WHOLE = 8 * 2**20  # … if they are integers or booleans: positions and masks decide the control flow
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # its view kernels use sizes only

_EXTENSION_DEVICE = 12  # kDLExtDev
_CODES = {  # DLDataTypeCode and bits of the dtypes that every torch from 2.11 on supports
    torch.uint8: (1, 8), torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
}  # fmt: skip


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("device", _DLDevice),
        ("dimensions", ctypes.c_int32),
        ("type", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_shared = _DLManagedTensor()  # read when a tensor is created, as its (null) deleter is when it is freed: one serves all


@dataclass(eq=False)
class Store:
    """The data behind one address on one card."""

    card: SimulatedCard
    address: int
    size: int
    block: Block | None  # None: it has 0 bytes
    values: torch.UntypedStorage | None  # values on the CPU; None: only the size is known
    valueless: bool = False  # whether it was copied from a valueless host tensor, and may be copied back
    fill: bool | int | float | None = None  # known value of all elements; used where `values` is None


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage on the device, with its store."""

    __slots__ = ("store",)
    store: Store


_stores: dict[int, Store] = {}
_lives: set[_StorageRef] = set()
_dead: list[weakref.ref[torch.UntypedStorage]] = []
_nowhere = itertools.count(2**62)  # addresses for storages of 0 bytes


def new_tensor(card: SimulatedCard, like: torch.Tensor, values: torch.UntypedStorage | None) -> torch.Tensor:
    """Return a newly allocated tensor on `card` with the layout and storage size of `like` and these `values`."""
    return new_at(card, like.untyped_storage().nbytes(), like.dtype, like.shape, like.stride(), values)


def new_at(
    card: SimulatedCard,
    size: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    values: torch.UntypedStorage | None = None,
) -> torch.Tensor:
    """Return a tensor on `card` with this layout in a new storage of `size` bytes.

    torch.OutOfMemoryError where the card is full.
    """
    free_dead_tensors()
    block = card.malloc(size) if size else None
    address = card.base + block.address if block else next(_nowhere)
    store = _stores[address] = Store(card, address, size, block, values)
    tensor = _tensor_at(store, dtype, shape, strides)
    _follow(tensor, store)
    return tensor


class ViewSpec(NamedTuple):
    """A view of a storage: dtype, shape, strides, and offset in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return the view that `tensor` is."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def tensors_in(card: SimulatedCard, block: Block, size: int, looks: Sequence[ViewSpec]) -> list[torch.Tensor]:
    """Return tensors that share a storage of `size` bytes in `block` of `card`, with unknown values."""
    store = _stores[card.base + block.address] = Store(card, card.base + block.address, size, block, None)
    whole = _tensor_at(store, torch.uint8, (size,), (1,))
    _follow(whole, store)
    return [view(whole.view(look.dtype), look.shape, look.strides, look.offset) for look in looks]


def _follow(tensor: torch.Tensor, store: Store) -> None:
    """Keep `store` registered until the last tensor of this storage is freed."""
    life = _StorageRef(tensor.untyped_storage(), _dead.append)  # a builtin: no KeyboardInterrupt can get lost in it
    life.store = store
    _lives.add(life)


def store_of(tensor: torch.Tensor) -> Store:
    return _stores[tensor.untyped_storage().data_ptr()]


def free_dead_tensors() -> None:
    """Free the blocks of storages that were released since the last call, in order of release."""
    if not _dead:
        return
    dead = _dead[:]
    del _dead[: len(dead)]  # another thread may have added to it by now
    for life in dead:
        assert isinstance(life, _StorageRef)
        _lives.discard(life)
        del _stores[life.store.address]
        if life.store.block is not None:
            life.store.card.allocator.free(life.store.block)


def view(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """Return another view of the storage of `tensor`."""
    seen: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(CPU_KEYS, tensor, shape, strides, offset)
    return seen


def _tensor_at(store: Store, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    if dtype not in _CODES or store.size != extent(shape, strides) * dtype.itemsize:
        whole = _tensor_at(store, torch.uint8, (store.size,), (1,))
        return view(whole.view(dtype), shape, strides, 0)
    code, bits = _CODES[dtype]
    array = ctypes.c_int64 * len(shape)
    sizes, steps = array(*shape), array(*strides)
    device = _DLDevice(_EXTENSION_DEVICE, store.card.index)
    _shared.tensor = _DLTensor(store.address, device, len(shape), _DLDataType(code, bits, 1), sizes, steps, 0)
    tensor: torch.Tensor = torch._C._from_dlpack(_capsule(ctypes.addressof(_shared), b"dltensor", None))
    return tensor


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor with these strides spans; 0 if it is empty."""
    if not all(shape):
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))


_aten = torch.ops.aten
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}
_COPIES = {_aten._to_copy.default, _aten.clone.default, _aten.copy_.default, _aten.repeat.default}
_QUESTIONS = {_aten.all.default, _aten.any.default} | {
    getattr(_aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
FOLLOWED = _FILLS | _COPIES | _QUESTIONS  # operations whose results may have a known fill


def fill_of(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool | int | float | None:
    """Return the value of all elements of the result of `op`, one of FOLLOWED; None where it is not known."""
    if op in _FILLS:
        filled: bool | int | float = args[1] if len(args) > 1 else 0
        return filled
    source = args[1 if op is _aten.copy_.default else 0]
    known = store_of(source).fill
    if known is None or op in _COPIES:
        return known
    answer: bool = op(torch.tensor([known], dtype=source.dtype), *args[1:]).item()
    return answer


def fits_values(card: SimulatedCard, dtype: torch.dtype, size: int) -> bool:
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return card.values == "real" or size <= (SMALL_WHOLE if whole else SMALL)


def note_fill(tensor: torch.Tensor, fill: bool | int | float, card: SimulatedCard) -> None:
    """Record that all elements of `tensor`, which has no values, are `fill`."""
    store = store_of(tensor)
    if tensor.nbytes != store.size:  # a view of part of a storage
        return
    if fits_values(card, tensor.dtype, store.size):
        store.values = torch.full((tensor.numel(),), fill, dtype=tensor.dtype).untyped_storage()
    else:
        store.fill = torch.tensor(fill, dtype=tensor.dtype).item()


def raise_unless_zeros_accepted(what: str, tensor: torch.Tensor) -> None:
    """Raise `valueless`, unless the card's `accepts_zeros` says yes.

    No variable refers to the error: a frame and an error that refer to each other stay until garbage is collected, and
    all tensors of the frame's callers with them.
    """
    accepts = store_of(tensor).card.accepts_zeros
    if accepts is None or not accepts(valueless(what, tensor)):
        raise valueless(what, tensor)


def valueless(what: str, tensor: torch.Tensor) -> RunError:
    """The RunError for `what` needs values of a tensor of which only the shape is kept."""
    shape = tuple(tensor.shape)
    return RunError(
        f"{what} needs the numbers of a tensor of shape {shape}, of which only the shape is kept: use values='real', "
        "or keep that part on the CPU",
        shape=list(shape),
    )
