"""Page-locked host memory, on a machine where nothing can lock pages.

torch's C++ hooks for a device written in Python say that no memory is pinned, and have none to give
(`PythonHooks::isPinnedPtr` and `getPinnedMemoryAllocator` in torch/csrc/acc/Module.cpp, torch 2.11 to 2.13), but
`pin_memory()` and `is_pinned()` are operations on CPU tensors like others. Here they are given kernels: a pinned
tensor is a copy in ordinary memory that is known to be pinned until it dies. `torch.empty(…, pin_memory=True)` asks
an allocator in C++, and stays impossible: `torch.empty(…).pin_memory()` does the same. Where torch has another
accelerator, its own kernels stay.
"""

from __future__ import annotations

import weakref

import torch

__all__ = ["is_pinned", "pin", "register"]

_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address; what died is looked past, and swept


def register(library: torch.library.Library) -> None:
    """Adds the kernels to `library`, of the "aten" namespace; they are gone when it is."""
    library.impl("is_pinned", is_pinned, "CPU")  # type: ignore[no-untyped-call]
    library.impl("_pin_memory", _pinned_copy, "CPU")  # type: ignore[no-untyped-call]


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether copies of the host `tensor` to a card and back need not wait."""
    storage = tensor.untyped_storage()
    known = _pinned.get(storage.data_ptr())
    return known is not None and known() is storage


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, known to be pinned from now on."""
    for address in [address for address, storage in _pinned.items() if storage() is None]:
        del _pinned[address]
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = weakref.ref(storage)
    return tensor


def _pinned_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return pin(tensor.clone())
