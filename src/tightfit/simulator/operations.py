"""An operation on a card: computed on CPU values or meta tensors; its results, bytes and time are put on the card."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.fused import STAND_INS
from tightfit.simulator.kernel_costs import KernelCost, kernel_cost_of
from tightfit.simulator.output_layouts import laid_out
from tightfit.simulator.storage import (
    CPU_KEYS,
    FOLLOWED,
    extent,
    fill_of,
    fits_values,
    free_dead_tensors,
    new_at,
    new_tensor,
    note_fill,
    store_of,
    valueless,
    view,
)

__all__ = ["NAME", "compute", "inner", "new_like"]

NAME = "privateuseone"  # torch's name of the device type; see backend.py for why it is kept
_aten = torch.ops.aten


def compute(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], card: SimulatedCard) -> Any:
    """Run `op` on `card`; return its result as tensors in memory allocated there."""
    if op not in FOLLOWED:
        return _computed(op, args, kwargs, card)
    fill = fill_of(op, args)
    result = _computed(op, args, kwargs, card)
    if fill is not None and store_of(result).values is None:
        note_fill(result, fill, card)
    return result


def _computed(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], card: SimulatedCard) -> Any:
    if op is _aten.index.Tensor:
        args = (args[0], _positions(args[1]))
    outer = [*_tensors(args), *_tensors(kwargs.values())]
    shapes = any(_is_shape(tensor, card) for tensor in outer) or _outgrows(op, args, kwargs, outer, card)
    key = _question(op, args, kwargs, outer, card) if shapes else None
    if key in _answers:
        return _answered(_answers[key], card)
    inside = {id(tensor): inner(tensor, shapes=shapes) for tensor in outer}
    place = torch.device("meta" if shapes else "cpu")
    inner_args = tuple(_replaced(value, inside, place) for value in args)
    inner_kwargs = {name: _replaced(value, inside, place) for name, value in kwargs.items()}
    result = _run(op, inner_args, inner_kwargs, shapes=shapes)
    for tensor in _written(op, args, kwargs):
        _note_write(tensor, inside[id(tensor)], card)
    back = {id(inside[id(tensor)]): tensor for tensor in outer}
    stores = {inside[id(tensor)].untyped_storage()._cdata: tensor for tensor in outer}
    outputs = list(_tensors((result,)))
    work = kernel_cost_of(op, inner_args, inner_kwargs, list(inside.values()), outputs, card.accelerator)
    if key is not None:
        _remember(key, op, result, stores.keys(), work)
    free_dead_tensors()
    with card.holding(work.early):
        final = _returned(result, back, stores, card)
        card.run_kernel(work)
    return final


def _positions(indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks in `indices` by the positions they select, whose number is then known even without values."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            found.append(index)
            continue
        mask = inner(index)
        if mask.is_meta:
            raise valueless("indexing with a mask", index)
        found += mask.nonzero().unbind(1)
    return found


def _run(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, shapes: bool) -> Any:
    if op in STAND_INS:
        return STAND_INS[op](*args, **kwargs)
    numbers = any(not isinstance(args[place], torch.Tensor) for place in _tensor_places(op) if place < len(args))
    call = op.overloadpacket if numbers else op  # torch passes on a Python number in place of the tensor made of it
    try:
        if not shapes:
            made = call(*args, **kwargs)  # a video convolution on the CPU does not keep channels last
            return laid_out(op, args, kwargs, made) if op.overloadpacket is _aten.convolution else made
        made = _written_out(op, call, args, kwargs) if op._schema.is_mutable else call(*args, **kwargs)
        return made if op._schema.is_mutable else laid_out(op, args, kwargs, made)
    except NotImplementedError as error:
        cause = str(error).partition("\n")[0]
        what, remedy = ("shapes alone", ", or use values='real'") if shapes else ("numbers", "")
        raise NotImplementedError(
            f"the simulated device cannot do {op} on {what}: {cause}. Keep that part on the CPU{remedy}"
        ) from error


@functools.cache
def _tensor_places(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Positions of the arguments of `op` that must be tensors, not numbers."""
    if torch._C._should_allow_numbers_as_tensors(op.overloadpacket.__name__):
        return ()
    return tuple(place for place, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor")


class _CachedResult(NamedTuple):
    """The cached result of an operation on shapes: layouts of the new tensors, and the kernel cost."""

    several: bool
    layouts: tuple[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], ...]
    work: KernelCost


_answers: dict[Any, _CachedResult] = {}  # cached, as torch's meta kernels are Python, and a network repeats its blocks
MOST_ANSWERS = 2**16


def _question(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: Sequence[torch.Tensor],
    card: SimulatedCard,
) -> Any:
    """The cache key of `op` on shapes: all that its result depends on; None where it must not be cached."""
    if not _only_makes(op) or any(tensor.device.type != NAME and tensor.ndim for tensor in outer):
        return None
    numbers = [id(tensor) for tensor in outer]
    same = tuple(map(numbers.index, numbers)) if len(set(numbers)) < len(numbers) else ()
    kind = card.accelerator.is_cpu, card.accelerator.compute_capability
    named = _signature(tuple(sorted(kwargs.items()))) if kwargs else ()
    return op, kind, same, _signature(args), named


@functools.cache
def _only_makes(op: torch._ops.OpOverload) -> bool:
    return not op._schema.is_mutable and op not in STAND_INS and op is not _aten.index.Tensor


def _remember(key: Any, op: torch._ops.OpOverload, result: Any, given: AbstractSet[int], work: KernelCost) -> None:
    outputs = result if isinstance(result, tuple) else (result,)
    if all(isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given for value in outputs):
        if len(_answers) >= MOST_ANSWERS:
            _answers.clear()
        layouts = tuple(
            (extent(value.shape, value.stride()) * value.itemsize, value.dtype, value.shape, value.stride())
            for value in outputs
        )
        _answers[key] = _CachedResult(len(op._schema.returns) > 1, layouts, work)


def _answered(answer: _CachedResult, card: SimulatedCard) -> Any:
    free_dead_tensors()
    with card.holding(answer.work.early):
        made = tuple(new_at(card, *layout) for layout in answer.layouts)
        card.run_kernel(answer.work)
    return made if answer.several else made[0]


def _written_out(op: torch._ops.OpOverload, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op`, which writes into its arguments, on shapes; an `out` that it resizes gets its kernel's layout."""
    out = kwargs.get("out")
    before = out.shape if isinstance(out, torch.Tensor) else None
    result = call(*args, **kwargs)
    if isinstance(out, torch.Tensor) and out.shape != before:
        out.as_strided_(out.shape, laid_out(op, args, kwargs, out).stride())
    return result


def _signature(value: Any) -> Any:
    """A hashable key of everything that a shape depends on; 1, 1.0 and True are distinct."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    return type(value), value


def inner(tensor: torch.Tensor, *, shapes: bool = False) -> torch.Tensor:
    """The tensor that `tensor` represents: values on the CPU, or a "meta" tensor if it has none, or if `shapes`."""
    if tensor.device.type != NAME:
        return tensor.to("meta") if shapes else tensor
    values = store_of(tensor).values
    if shapes or values is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    found = torch.empty(0, dtype=tensor.dtype).set_(values, tensor.storage_offset(), tensor.shape, tensor.stride())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def _is_shape(tensor: torch.Tensor, card: SimulatedCard) -> bool:
    """Whether `tensor` has no values, or is (perhaps by expansion) too large for its results to keep theirs."""
    if tensor.device.type != NAME:
        return False
    return store_of(tensor).values is None or not fits_values(card, tensor.dtype, tensor.nbytes)


_ARITHMETIC = {_aten.convolution.default, _aten.addmm.default, _aten.bmm.default, _aten.mm.default}


def _outgrows(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: Sequence[torch.Tensor],
    card: SimulatedCard,
) -> bool:
    """Whether the result of an expensive operation is too large to keep its values."""
    if op not in _ARITHMETIC or card.values == "real":
        return False
    inside = {id(tensor): inner(tensor, shapes=True) for tensor in outer}
    made = op(*(_replaced(value, inside, torch.device("meta")) for value in args), **kwargs)
    return not fits_values(card, made.dtype, made.nbytes)


def new_like(value: torch.Tensor, card: SimulatedCard) -> torch.Tensor:
    """Return a tensor on `card` with the layout of the meta tensor `value`, and memory for values if they are kept."""
    size = value.untyped_storage().nbytes()
    keeps = fits_values(card, value.dtype, size)
    return new_tensor(card, value, torch.empty(size, dtype=torch.uint8).untyped_storage() if keeps else None)


def _note_write(tensor: torch.Tensor, inside: torch.Tensor, card: SimulatedCard) -> None:
    """After `inside` was written: update the size of `tensor`, and drop its values if `inside` has none."""
    if inside.shape != tensor.shape:
        _aten.set_.source_Tensor.redispatch(CPU_KEYS, tensor, _result(inside, card))
    elif inside.is_meta and tensor.device.type == NAME:
        store_of(tensor).values = store_of(tensor).fill = None


def _result(value: torch.Tensor, card: SimulatedCard) -> torch.Tensor:
    """Put an operation's output on `card`, with its values if they are kept."""
    storage = value.untyped_storage()
    keeps = not value.is_meta and fits_values(card, value.dtype, storage.nbytes())
    return new_tensor(card, value, storage if keeps else None)


def _returned(value: Any, back: dict[int, torch.Tensor], stores: dict[int, torch.Tensor], card: SimulatedCard) -> Any:
    """Return `value` with its tensors on the card: the inputs themselves, views of them, and new tensors."""
    if isinstance(value, torch.Tensor):
        if id(value) in back:
            return back[id(value)]
        store = stores.get(value.untyped_storage()._cdata)
        if store is not None:
            return view(store, value.shape, value.stride(), int(value.storage_offset()))
        return _result(value, card)
    if isinstance(value, list | tuple):
        return type(value)(_returned(item, back, stores, card) for item in value)
    return value


def _replaced(value: Any, inside: dict[int, torch.Tensor], place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return inside[id(value)]
    if isinstance(value, list | tuple):
        return [_replaced(item, inside, place) for item in value]
    return place if isinstance(value, torch.device) else value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that `op` writes, by its schema."""
    for position, name in _writes(op):
        value = kwargs.get(name, args[position] if position < len(args) else None)
        yield from _tensors((value,))


@functools.cache
def _writes(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
