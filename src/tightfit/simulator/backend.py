"""The torch device "privateuseone": registers it, and sends every operation on it to the simulated card it is on.

torch lets the device type PrivateUse1 be written in Python (`_setup_privateuseone_for_python_backend`, from 2.10
on, marked experimental: this is the only file that knows of it). It keeps torch's own name: as soon as it has another,
torch takes it for the process's accelerator, before CUDA (`at::getAccelerator` in aten/src/ATen/DeviceAccelerator.cpp,
torch 2.11 to 2.15), and asks it for page-locked memory and streams. Under its own name it changes nothing for anybody
else, so calls can be simulated in a process that uses a real card. An operation is one kernel here where CUDA has one
kernel for it, so that memory is what it is there; what CUDA puts together from others is put together from them here.
Which is which stands in torch's own table of native functions, which every torch brings along.
"""

from __future__ import annotations

import functools
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
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.host_memory import cloning, copy, to_copy
from tightfit.simulator.native_functions import cuda_kernels
from tightfit.simulator.operations import NAME, compute, inner, let_zeros_do, new_like
from tightfit.simulator.storage import CPU_KEYS, free_dead_tensors, store_of, view
from tightfit.simulator.torch_api import group_norm, offer_generators

__all__ = ["cards_in_use", "use_cards"]

_aten = torch.ops.aten
_cards: list[SimulatedCard] = []
_libraries: list[torch.library.Library] = []  # what they registered goes when they do


def use_cards(cards: Sequence[SimulatedCard]) -> None:
    """From now on, `cards` are "privateuseone:0" and so on. What lives on earlier ones stays there; () is none.

    RunError where another backend has taken the one place that torch has for such devices.
    """
    _install()
    _cards[:] = cards
    offer_generators(bool(cards))


def cards_in_use() -> tuple[SimulatedCard, ...]:
    return tuple(_cards)


@functools.cache
def _install() -> None:
    """Registers the device, once for the process and never at import: some vendors' backends want the same place."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken != NAME or hasattr(torch, NAME):
        raise RunError(f"torch has one device type for backends like {NAME}, and {taken} has taken it", taken=taken)
    alone = torch.accelerator.current_accelerator(check_available=True) is None  # a build for CUDA may have no card
    _setup_privateuseone_for_python_backend(backend_module=_DeviceModule())
    rest = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(_dispatch, "PrivateUse1")  # type: ignore[no-untyped-call]
    known = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for op, kernel in ({op: op for op in (*cuda_kernels(), *_SPECIAL)} | _ONE_KERNEL).items():
        known.impl(op, functools.partial(_dispatch, kernel), "PrivateUse1")  # type: ignore[no-untyped-call]
    for lazy in ("Conjugate", "Negative"):  # torch would resolve these bits by a copy, which is what it is about to do
        known.impl(_aten._copy_from.default, torch.library.fallthrough_kernel, lazy)  # type: ignore[no-untyped-call]
    autocast.register(rest, known)
    if alone:
        pinning.register(known)
    _libraries.extend((rest, known))
    torch.UntypedStorage.clone = cloning(torch.UntypedStorage.clone)  # type: ignore[method-assign]


class _DeviceModule:
    """What torch asks the module of a device (`torch.privateuseone`)."""

    def is_available(self) -> bool:
        return bool(_cards)

    def device_count(self) -> int:
        return len(_cards)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """The CPU's generator stands in for all."""

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

    # what offloading of others asks of `torch.cuda`

    def Stream(self, device: Any = None) -> streams.Stream:  # noqa: N802  a class there
        card = _card(torch.device(device or NAME))
        return streams.Stream(card, card.new_stream())

    def current_stream(self, device: Any = None) -> streams.Stream:
        card = _card(torch.device(device or NAME))
        return streams.Stream(card, card.stream)

    def stream(self, stream: streams.Stream | None) -> AbstractContextManager[None]:
        return streams.giving_to(stream)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Bytes that its allocator has not taken, and all that it has."""
        free_dead_tensors()
        allocator = _card(torch.device(device or NAME)).allocator
        return allocator.capacity - allocator.reserved.now, allocator.capacity

    def memory_allocated(self, device: Any = None) -> int:
        free_dead_tensors()
        return _card(torch.device(device or NAME)).live.now

    def memory_reserved(self, device: Any = None) -> int:
        free_dead_tensors()
        return _card(torch.device(device or NAME)).held.now


# one kernel on CUDA, though the table has no CUDA key for it; and what runs in its place
_ONE_KERNEL = {_aten.convolution_overrideable.default: _aten.convolution.default}


def _dispatch(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **kwargs)
    if op in _VIEWS:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    if op in _INDEXED:  # positions and masks may come from the host
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
    """Where the tensors in `values` are; numbers without dimensions may come from the host."""
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
    """The card that new tensors on `device` go to."""
    index = device.index or 0
    if index >= len(_cards):
        raise RunError(f"there is no {NAME}:{index}: {len(_cards)} simulated cards are in use", cards=len(_cards))
    return _cards[index]


# operations that make memory, or look at numbers


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    layout = memory_format or torch.contiguous_format
    return new_like(torch.empty(size, dtype=dtype, device="meta", memory_format=layout), _card(device))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return new_like(torch.empty_strided(size, stride, dtype=dtype, device="meta"), _card(device))


def _item(tensor: torch.Tensor) -> Any:
    numbers = inner(tensor)
    if numbers.is_meta:
        let_zeros_do("item()", tensor)
        numbers = torch.zeros(tensor.shape, dtype=tensor.dtype)
    store_of(tensor).card.let_host_wait()
    return numbers.item()


def _check_errors(info: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """What torch asks after a decomposition of a matrix: nothing is known to be wrong with a shape."""
    numbers = inner(info)
    store_of(info).card.let_host_wait()
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
    _aten.empty.memory_format: _empty,
    _aten.empty_strided.default: _empty_strided,
    _aten.group_norm.default: group_norm,
    _aten.record_stream.default: _record_stream,
    _aten.resize_.default: _resize,
    _aten.scaled_dot_product_attention.default: attend,
    _aten.set_.source_Storage_storage_offset: _set,
    _aten.set_.source_Tensor: _set,
}
