"""Page-locked host memory, on a machine where nothing can lock pages, and host memory that holds nothing.

torch's C++ hooks for a device written in Python say that no memory is pinned, and have none to give
(`PythonHooks::isPinnedPtr` and `getPinnedMemoryAllocator` in torch/csrc/acc/Module.cpp, torch 2.11 to 2.13), but
`pin_memory()` and `is_pinned()` are operations on CPU tensors like others. Here they are given kernels: a pinned
tensor is a copy in ordinary memory that is known to be pinned until it dies. `torch.empty(…, pin_memory=True)` asks
an allocator in C++, and stays impossible: `torch.empty(…).pin_memory()` does the same. Where torch has another
accelerator, its own kernels stay.

Hollow tensors stand for weights on a host that has none: unlike those on "meta" they can be moved by whoever moves
weights, and they cost nothing as long as nobody looks at them, since their pages are never touched.
"""

from __future__ import annotations

import weakref

import torch

__all__ = ["is_pinned", "is_valueless", "mark_valueless", "pin", "register"]


class _Known:
    """Tensors in host memory of which something is known, until their storage dies."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # what died is swept now and then

    def __contains__(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        return known is not None and known() is storage

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        for number in [number for number, storage in self._storages.items() if storage() is None]:
            del self._storages[number]
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = weakref.ref(storage)
        return tensor


_pinned, _hollow = _Known(), _Known()


def register(library: torch.library.Library) -> None:
    """Adds the kernels to `library`, of the "aten" namespace; they are gone when it is."""
    library.impl("is_pinned", is_pinned, "CPU")  # type: ignore[no-untyped-call]
    library.impl("_pin_memory", _pinned_copy, "CPU")  # type: ignore[no-untyped-call]


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether copies of the host `tensor` to a card and back need not wait."""
    return tensor in _pinned


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, known to be pinned from now on."""
    return _pinned.add(tensor)


def is_valueless(tensor: torch.Tensor) -> bool:
    """Whether the host `tensor` stands for numbers that are not there."""
    return tensor in _hollow


def mark_valueless(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose numbers nobody is to look at from now on."""
    return _hollow.add(tensor)


def _pinned_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return pin(mark_valueless(torch.empty_like(tensor)) if is_valueless(tensor) else tensor.clone())
