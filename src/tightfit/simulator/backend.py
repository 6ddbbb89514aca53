"""The torch device "privateuseone": registers it, and dispatches each operation on it to its simulated card.

torch allows a backend for the device type PrivateUse1 in Python (`_setup_privateuseone_for_python_backend`, from 2.10
on, marked experimental: only this file uses it). The device keeps torch's own name: if renamed, torch would take it for
the process's accelerator, before CUDA (`at::getAccelerator` in aten/src/ATen/DeviceAccelerator.cpp, torch 2.11 to
2.15), and request page-locked memory and streams from it. Under torch's name it does not affect other devices, so calls
can be simulated in a process that uses a real card. An operation is one kernel here where CUDA has one kernel for it,
so that memory use matches; operations that CUDA composes from others are composed here too. torch's table of native
functions, which is part of every torch installation, lists which are kernels.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tightfit.errors import RunError
from tightfit.simulator import host_memory as pinning
from tightfit.simulator import torch_api as autocast
from tightfit.simulator import torch_api as streams
from tightfit.simulator.attention import attend
from tightfit.simulator.backward import offer_backward
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.host_memory import cloning, copy, to_copy
from tightfit.simulator.native_functions import cuda_kernels
from tightfit.simulator.operations import NAME, compute, inner, new_like
from tightfit.simulator.storage import CPU_KEYS, free_dead_tensors, raise_unless_zeros_accepted, store_of, view
from tightfit.simulator.torch_api import count_module_calls, group_norm, offer_generators

__all__ = ["SIMULATOR_LOCK", "cards_in_use", "use_cards"]

_aten = torch.ops.aten
# held while simulated cards compute, or others are put in their place: all threads share one set of cards
SIMULATOR_LOCK = threading.RLock()

_cards: list[SimulatedCard] = []
_libraries: list[torch.library.Library] = []  # their registrations end when they are freed


def use_cards(cards: Sequence[SimulatedCard]) -> None:
    """Make `cards` the devices "privateuseone:0" and so on; () is none. Existing tensors stay on their earlier cards.

    RunError where another backend has registered torch's PrivateUse1 device type.
    """
    _install()
    _cards[:] = cards
    offer_generators(bool(cards))
    offer_backward(NAME, offered=bool(cards))
    count_module_calls([card.host for card in cards])


def cards_in_use() -> tuple[SimulatedCard, ...]:
    return tuple(_cards)


_installing = threading.Lock()


def _install() -> None:
    """Register the device, once per process and never at import: some vendors' backends use the same device type."""
    with _installing:  # several threads may measure at the same time
        _install_once()


@functools.cache
def _install_once() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken != NAME or hasattr(torch, NAME):
        raise RunError(f"torch has one device type for backends like {NAME}, and {taken} has taken it", taken=taken)
    alone = torch.accelerator.current_accelerator(check_available=True) is None  # a CUDA build may have no card
    _setup_privateuseone_for_python_backend(backend_module=_DeviceModule())
    rest = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(_dispatch, "PrivateUse1")  # type: ignore[no-untyped-call]
    known = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for op, kernel in ({op: op for op in (*cuda_kernels(), *_SPECIAL)} | _ONE_KERNEL).items():
        known.impl(op, functools.partial(_dispatch, kernel), "PrivateUse1")  # type: ignore[no-untyped-call]
    for lazy in ("Conjugate", "Negative"):  # torch would resolve these bits by a copy, which this operation is anyway
        known.impl(_aten._copy_from.default, torch.library.fallthrough_kernel, lazy)  # type: ignore[no-untyped-call]
    for op in (_aten.group_norm.default, _aten.scaled_dot_product_attention.default):  # made of others, with gradients
        known.impl(op, functools.partial(_dispatch, op), "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    autocast.register(rest, known)
    if alone:
        pinning.register(known)
    _libraries.extend((rest, known))
    torch.UntypedStorage.clone = cloning(torch.UntypedStorage.clone)  # type: ignore[method-assign]


class _DeviceModule:
    """The functions that torch looks up in a device's module (`torch.privateuseone`)."""

    def is_available(self) -> bool:
        return bool(_cards)

    def device_count(self) -> int:
        return len(_cards)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the CPU's generator is used for all cards."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def synchronize(self, device: Any = None) -> None:
        for card in _cards:
            card.timeline.synchronize()

    def empty_cache(self) -> None:
        for card in _cards:
            card.allocator.empty_cache()

    # functions of `torch.cuda` that other offloading libraries call

    def Stream(self, device: Any = None) -> streams.Stream:  # noqa: N802  a class in torch.cuda
        card = _card(torch.device(device or NAME))
        return streams.Stream(card, card.new_stream())

    def current_stream(self, device: Any = None) -> streams.Stream:
        card = _card(torch.device(device or NAME))
        return streams.Stream(card, card.stream)

    def stream(self, stream: streams.Stream | None) -> AbstractContextManager[None]:
        return streams.giving_to(stream)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the bytes that its allocator has not reserved, and its capacity."""
        free_dead_tensors()
        allocator = _card(torch.device(device or NAME)).allocator
        return allocator.capacity - allocator.reserved.now, allocator.capacity

    def memory_allocated(self, device: Any = None) -> int:
        free_dead_tensors()
        return _card(torch.device(device or NAME)).live.now

    def memory_reserved(self, device: Any = None) -> int:
        free_dead_tensors()
        return _card(torch.device(device or NAME)).held.now


# operations with one kernel on CUDA, although the table has no CUDA key for them → the operation to run
_ONE_KERNEL = {_aten.convolution_overrideable.default: _aten.convolution.default}


def _convolution_backward(
    given: torch.Tensor, maps: torch.Tensor, weight: torch.Tensor, *settings: Any, **masks: Any
) -> Any:
    """What torch calls for devices like this one, as the operation of all others."""
    return _aten.convolution_backward.default(given, maps, weight, [len(given[0])], *settings, **masks)


def _dispatch(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **kwargs)
    if op in _VIEWS:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    if op in _INDEXED:  # indices and masks may be on the host
        indexed, indices, *rest = args
        args = (indexed, [index if index is None else index.to(indexed.device) for index in indices], *rest)
    return compute(op, args, kwargs, _card_of(op, args, kwargs))


_VIEWS = {
    _aten._reshape_alias.default,
    _aten.as_strided.default,
    _aten.unfold.default,
    _aten.view.default,
    _aten.view_as_complex.default,
    _aten.view_as_real.default,
}


_INDEXED = {_aten._index_put_impl_.default, _aten.index.Tensor, _aten.index_put_.default}


def _card_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimulatedCard:
    places = list(dict.fromkeys(_places((*args, *kwargs.values()))))
    if len(places) > 1 or not isinstance(places[0], SimulatedCard):
        names = " and ".join(sorted(f"{NAME}:{p.index}" if isinstance(p, SimulatedCard) else p for p in places))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {names}! ({op})"
        )
    return places[0]


def _places(values: Iterable[Any]) -> Iterator[SimulatedCard | str]:
    """Yield the cards, and names of other devices, of the tensors in `values`; 0-dim tensors may be on the host."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == NAME:
                yield store_of(value).card
            elif value.ndim:
                yield str(value.device)
        elif isinstance(value, torch.device):
            yield _card(value)
        elif isinstance(value, list | tuple):
            yield from _places(value)


def _card(device: torch.device) -> SimulatedCard:
    """Return the card for new tensors on `device`; RunError if there is none with its index."""
    index = device.index or 0
    if index >= len(_cards):
        raise RunError(f"there is no {NAME}:{index}: {len(_cards)} simulated cards are in use", cards=len(_cards))
    return _cards[index]


# operations that allocate memory, or read values


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    layout = memory_format or torch.contiguous_format
    return new_like(torch.empty(size, dtype=dtype, device="meta", memory_format=layout), _card(device))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return new_like(torch.empty_strided(size, stride, dtype=dtype, device="meta"), _card(device))


def _item(tensor: torch.Tensor) -> Any:
    numbers = inner(tensor)
    if numbers.is_meta:
        raise_unless_zeros_accepted("item()", tensor)
        numbers = torch.zeros(tensor.shape, dtype=tensor.dtype)
    store_of(tensor).card.block_host()
    return numbers.item()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two tensors as CUDA does, whose host waits for the answer."""
    return one.shape == other.shape and bool((one == other).all().item())


def _check_errors(info: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Check the result of a matrix decomposition, as torch does; without values there is nothing to check."""
    numbers = inner(info)
    store_of(info).card.block_host()
    if not numbers.is_meta:
        _aten._linalg_check_errors(numbers, *args, **kwargs)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    store = store_of(tensor)
    if store.block is not None:
        store.card.allocator.use(store.block, stream.stream_id)


def _set(tensor: torch.Tensor, source: Any, *place: Any) -> torch.Tensor:
    op = _aten.set_.source_Tensor if isinstance(source, torch.Tensor) else _aten.set_.source_Storage_storage_offset
    result: torch.Tensor = op.redispatch(CPU_KEYS, tensor, source, *place)
    return result


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    if shape.nbytes > tensor.untyped_storage().nbytes():
        return _set(tensor, new_like(shape, store_of(tensor).card))
    return _set(tensor, view(tensor, shape.shape, shape.stride(), int(tensor.storage_offset())))


_SPECIAL: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten._copy_from.default: copy,
    _aten._linalg_check_errors.default: _check_errors,
    _aten._local_scalar_dense.default: _item,
    _aten._to_copy.default: to_copy,
    _aten.convolution_backward_overrideable.default: _convolution_backward,
    _aten.empty.memory_format: _empty,
    _aten.empty_strided.default: _empty_strided,
    _aten.equal.default: _equal,
    _aten.group_norm.default: group_norm,
    _aten.record_stream.default: _record_stream,
    _aten.resize_.default: _resize,
    _aten.scaled_dot_product_attention.default: attend,
    _aten.set_.source_Storage_storage_offset: _set,
    _aten.set_.source_Tensor: _set,
}
