"""What every store of weights has in common, and how tensors are taken apart and moved for it.

A store knows the layout of its weights in the bytes that it sends, so that weights become views of the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.device import Device
from tightfit.files import FileState
from tightfit.measure.modules import weight_tensors

__all__ = [
    "ALIGNMENT",
    "HOST",
    "FileTensor",
    "Held",
    "TensorLayout",
    "WeightStore",
    "forget_casts",
    "moved",
    "plain_parts",
    "rebuilt",
    "relocate",
    "version_of",
    "write_back",
]

Held = dict[int, list[torch.Tensor]]  # plain tensors of weights before they were moved, by id() of the weight
HOST = torch.device("cpu")
ALIGNMENT = 256  # bytes; the largest alignment of a matrix by which libraries choose kernels


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a plain tensor in a store's bytes. `offset` in bytes, a multiple of its item size."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of `region` (uint8)."""
        typed = region.view(self.dtype) if region.nbytes % self.dtype.itemsize == 0 else self._cut(region)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset // self.dtype.itemsize)

    def _cut(self, region: torch.Tensor) -> torch.Tensor:
        return region[: region.nbytes // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True)
class FileTensor:
    """A dense tensor in a file, from byte `offset` on, with the `strides` in which it is used."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]  # in elements
    state: FileState | None = None  # of the file, when it was found there

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class WeightStore(ABC):
    """The source parameters of a group. `size` bytes are sent; `layouts` are of its plain tensors, in order."""

    size: int
    alignment = ALIGNMENT  # of the memory that it sends to, in bytes
    writable: bool  # whether changes of a weight can be written to its source parameter
    layouts: tuple[TensorLayout, ...]
    stored: tuple[FileTensor, ...] = ()  # where its plain tensors are in files, if they are
    lock_refused = False  # whether page-locking was asked for and refused

    def lock_pages(self) -> bool:
        """Page-lock the source parameters; return whether they are locked."""
        return False

    def unlock_pages(self) -> None:  # noqa: B027 - most have nothing to unlock
        """Wait for copies in flight and unlock the source parameters."""

    def release(self) -> None:  # noqa: B027 - most have no memory of their own
        """Let go of the memory of the source parameters, which keep it: no more is sent."""

    def values(self) -> list[torch.Tensor]:
        """Return the plain tensors; called only where source parameters have no values."""
        raise NotImplementedError

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it still has the data of `tensors`, its source parameters; other code may give them other data."""
        return True

    def anew(self, tensors: Sequence[torch.Tensor]) -> WeightStore:
        """Return a store for the current data of `tensors`, which it does not hold; it replaces this one."""
        raise NotImplementedError

    @abstractmethod
    def send(self, stream: CopyStream, target: torch.Tensor, after: Any) -> CopyHandle:
        """Send all to `target` (uint8, `size` bytes), beginning after the mark `after`."""


def write_back(original: torch.Tensor, written: torch.Tensor, device: Device) -> None:
    """Write `written`, a changed weight on `device`, to `original` in host memory, in its new dtype and shape."""
    stored = device.to_host(written)
    if stored.is_meta and not original.is_meta:  # a simulated card may have only shapes
        stored = torch.zeros_like(stored, device=original.device)
    if (stored.dtype, stored.shape) == (original.dtype, original.shape):
        original.data.copy_(stored)
    else:
        original.data = stored


def version_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that changes when `tensor` is written to or given other data."""
    return tuple((part._version, part.data_ptr(), part.dtype) for part in plain_parts(tensor))


def forget_casts() -> None:
    """Free the copies of weights that autocast caches until it ends: newly loaded weights never match them."""
    torch.clear_autocast_cache()


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that `tensor` consists of: itself, or those inside a tensor subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def rebuilt(like: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor like `like` with other plain `parts`, which are popped from the front of the list."""
    if not is_traceable_wrapper_subclass(like):
        return parts.pop(0)
    names, context = like.__tensor_flatten__()
    inside = {name: rebuilt(getattr(like, name), parts) for name in names}
    whole: torch.Tensor = type(like).__tensor_unflatten__(inside, context, like.shape, like.stride())
    return whole


def relocate(tensor: torch.Tensor, device: torch.device) -> None:
    """Move `tensor` in place to `device`, with all tensors that it consists of."""
    _adopt(tensor, rebuilt(tensor, [part.data.to(device) for part in plain_parts(tensor)]))


def _adopt(tensor: torch.Tensor, new: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # `.data` reaches the outer tensor alone
            _adopt(getattr(tensor, name), getattr(new, name))
    tensor.data = new


def moved(module: nn.Module, target: torch.device, held: Held) -> Callable[[], None]:
    """Move the weights of `module` to `target`; return how to move each back to where it was.

    Original tensors in host memory are kept in `held` until its owner clears it, so that a card that fails early need
    not copy them back.
    """
    stores = {id(tensor): tensor.device for tensor in weight_tensors(module) if not tensor.is_meta}
    usual = next(iter(stores.values()), HOST)  # for weights that are loaded in the meantime

    def move_back() -> None:
        for tensor in _found_elsewhere(module, lambda tensor: stores.get(id(tensor), usual)):
            if id(tensor) in held:
                _adopt(tensor, rebuilt(tensor, held.pop(id(tensor))))
            else:
                relocate(tensor, stores.get(id(tensor), usual))

    try:
        for tensor in _found_elsewhere(module, lambda tensor: target):
            before = [part.data for part in plain_parts(tensor)]
            relocate(tensor, target)
            if stores[id(tensor)] == HOST:
                held[id(tensor)] = before
    except BaseException:  # e.g. out of memory half way
        move_back()
        raise
    return move_back


def _found_elsewhere(module: nn.Module, place: Callable[[torch.Tensor], torch.device]) -> Iterator[torch.Tensor]:
    """Yield weights of `module` that are not where `place` says; "meta" tensors have no values to move."""
    for tensor in weight_tensors(module):
        if tensor.device != place(tensor) and not tensor.is_meta:
            yield tensor
