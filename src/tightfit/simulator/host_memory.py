"""Copies between the host and simulated cards, and page-locked host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tightfit.simulator.operations import NAME, compute, inner
from tightfit.simulator.output_layouts import is_dense
from tightfit.simulator.storage import CPU_KEYS, free_dead_tensors, raise_unless_zeros_accepted, store_of

__all__ = ["cloning", "copy", "is_pinned", "is_valueless", "mark_valueless", "pin", "register", "to_copy"]


_aten = torch.ops.aten


def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy `source` to `target`: between the host and a card, between two cards, or within one; return `target`.

    As on CUDA, a copy from or to pageable memory blocks the host even with `non_blocking`.
    """
    if target.device.type != NAME:
        card = store_of(source).card
        numbers = inner(source)
        if target.is_meta:  # host memory without values, for a model without weights
            pass
        elif store_of(source).valueless:
            mark_valueless(target)
        elif numbers.is_meta:
            raise_unless_zeros_accepted("a copy to the host", source)
            target.zero_()
        else:
            target.copy_(numbers)
        with card.holding(_buffers(source, target, non_blocking)):
            card.copy_out(source.nbytes, pinned=is_pinned(target), wait=not non_blocking)
        return target
    store = store_of(target)
    card = store.card
    if source.device == target.device:
        store.valueless = store_of(source).valueless
        return compute(_aten.copy_.default, (target, source), {}, card)  # type: ignore[no-any-return]
    numbers = inner(source)
    store.valueless = source.device.type != NAME and is_valueless(source)
    store.fill = None
    if numbers.is_meta or store.valueless:
        store.values = None
    elif store.values is not None:
        inner(target).copy_(numbers)
    if source.device.type == NAME:
        other = store_of(source).card  # as torch does: the copy waits for both streams, and the other one for it
        other.timeline.wait(other.stream, card.record())
        other.copy_out(source.nbytes, pinned=True, wait=False)
        card.timeline.wait(card.stream, other.record())
    pinned = source.device.type == NAME or is_pinned(source)
    with card.holding(() if source.device.type == NAME else _buffers(source, target, non_blocking)):
        card.copy_in(source.nbytes, pinned=pinned, wait=not non_blocking)
    return target


def _buffers(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> tuple[int, ...]:
    """Bytes of temporary buffers on the card for a copy between host and card.

    The transfer itself is contiguous and of one dtype. The dtype is converted on the card if the copy is non-blocking,
    else on the host (`copy_kernel_cuda` in cuda/Copy.cu).
    """
    free_dead_tensors()
    alike = source.dtype == target.dtype
    if alike and _lie_alike(source, target):
        return ()
    layers = source.device.type == NAME
    if not layers:
        size = target.numel() * (source if non_blocking else target).itemsize
        return () if target.is_contiguous() and (alike or not non_blocking) else (size,)
    size = target.numel() * (target if non_blocking else source).itemsize
    changed = (size,) if non_blocking and not alike else ()  # dense, even if the source is not
    contiguous = source.is_contiguous() or (changed and not is_dense(source.shape, source.stride()))
    return changed if contiguous else (*changed, size)


def _lie_alike(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a single plain memory copy suffices: equal shapes and strides, and dense."""
    both = zip(source.shape, source.stride(), target.stride(), strict=True)
    same = source.shape == target.shape and all(one == other for size, one, other in both if size > 1)
    return same and is_dense(source.shape, source.stride())


def to_copy(tensor: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
    """`aten._to_copy`; a non-blocking copy to the CPU gets a pinned result, which torch cannot do for this device."""
    if non_blocking and device is not None and device.type == "cpu":
        return pin(torch.empty_like(tensor, device=device, **options)).copy_(tensor, non_blocking=True)
    copied: torch.Tensor = _aten._to_copy.default.redispatch(
        CPU_KEYS, tensor, device=device, non_blocking=non_blocking, **options
    )
    return copied


def cloning(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `clone` of storages, which `copy.deepcopy` uses: torch's own crashes for a device without C++."""

    def clone(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != NAME:
            return torchs(storage)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        return whole.clone().untyped_storage()

    return clone


class _Known:
    """A set of host tensors, by storage; an entry ends when its storage is freed."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address; freed ones are removed in `add`

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


_pinned, _valueless = _Known(), _Known()


def register(library: torch.library.Library) -> None:
    """Register the pinning kernels in `library`, of the "aten" namespace; they exist as long as it does."""
    library.impl("is_pinned", is_pinned, "CPU")  # type: ignore[no-untyped-call]
    library.impl("_pin_memory", _pinned_copy, "CPU")  # type: ignore[no-untyped-call]


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether the host `tensor` is marked as pinned: its copies to and from a card need not block."""
    return tensor in _pinned


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor` as pinned and return it."""
    return _pinned.add(tensor)


def is_valueless(tensor: torch.Tensor) -> bool:
    """Whether the host `tensor` is a placeholder without meaningful values."""
    return tensor in _valueless


def mark_valueless(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor` as a placeholder, whose values must not be used, and return it."""
    return _valueless.add(tensor)


def _pinned_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return pin(mark_valueless(torch.empty_like(tensor)) if is_valueless(tensor) else tensor.clone())
