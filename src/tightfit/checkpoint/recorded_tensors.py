"""Tensors without values that record what is done with them: a conversion runs on them, and later on one at a time.

Conversions of checkpoints rename, cut, join and transpose tensors, and look at shapes. They run on these tensors as on
any others; each result then knows the operations and the stored tensors that it is made of. Most results are whole
stretches of the file, one after another, which need no memory; the others are computed when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tightfit.apply.weights.disk_store import read_stored
from tightfit.apply.weights.weight_store import FileTensor
from tightfit.checkpoint.output_files import ChunkReader, TensorSource, byte_view, rounded
from tightfit.checkpoint.tensors import TensorLocation
from tightfit.devices.disk import Extent
from tightfit.errors import ModelError

__all__ = ["ConstantTensor", "ConvertedTensor", "RecordedTensor"]

_CAT, _CLONE = torch.ops.aten.cat.default, torch.ops.aten.clone.default


class RecordedStep(NamedTuple):
    """The output of this `number` of an operation of torch; None: it has one."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int | None


class RecordedTensor(torch.Tensor):
    """A tensor on the CPU, by its shape and dtype, that is either stored or the result of a step; it has no values."""

    shape_only: torch.Tensor  # the same on "meta": views share their storage with what they are views of
    origin: TensorLocation | RecordedStep

    @staticmethod
    def __new__(cls, shape_only: torch.Tensor, origin: TensorLocation | RecordedStep) -> RecordedTensor:
        made: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape_only.shape, strides=shape_only.stride(), storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype, device=torch.device("cpu"),
        )  # fmt: skip
        made.shape_only, made.origin = shape_only, origin
        return made

    def __init__(self, shape_only: torch.Tensor, origin: TensorLocation | RecordedStep) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def stored(cls, place: TensorLocation) -> RecordedTensor:
        return cls(torch.empty(place.shape, dtype=place.dtype, device="meta"), place)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on shapes. ModelError if it writes into a tensor; an error of torch if it needs values."""
        operation, kwargs = func, kwargs or {}
        if operation._schema.is_mutable:
            raise ModelError(f"the conversion writes into a tensor ({operation}), which is not followed")
        if operation is _CAT and len(args[0]) == 1:
            args, operation = (args[0][0],), _CLONE
        if operation is _CLONE and isinstance(args[0], cls) and args[0].is_contiguous():
            return cls(args[0].shape_only, args[0].origin)  # nothing is written into it: no copy is needed
        of_shapes = tree_map(_shape_only, (args, kwargs))
        made = operation(*of_shapes[0], **of_shapes[1])
        if isinstance(made, torch.Tensor):
            return cls(made, RecordedStep(operation, args, kwargs, None))
        return [cls(each, RecordedStep(operation, args, kwargs, number)) for number, each in enumerate(made)]


def _shape_only(value: Any) -> Any:
    if isinstance(value, RecordedTensor):
        return value.shape_only
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


class ConvertedTensor(TensorSource):
    """A result of a conversion, rounded to `dtype`."""

    def __init__(self, tensor: RecordedTensor, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self.dtype, self.shape = dtype, tuple(tensor.shape)
        self.places = tuple(dict.fromkeys(_places(tensor)))

    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        """Read it in pieces where the file has its bytes in order, else compute it: at most all of its `places`, the
        result, and one more of its size are in memory then."""
        stretches = _stretches(self._tensor)
        if stretches is None:
            value = _evaluate(self._tensor, lambda place: _read(place, reader), {})
            as_stored = value.dtype == self.dtype and value.is_contiguous()
            yield byte_view(value if as_stored else rounded(value, self.dtype))
            return
        for extent in stretches:
            for chunk in reader.chunks(extent):
                yield byte_view(chunk if self._as_stored else rounded(chunk.view(self._tensor.dtype), self.dtype))

    @property
    def _as_stored(self) -> bool:
        return bool(self._tensor.dtype == self.dtype)


class ConstantTensor(TensorSource):
    """A tensor that the conversion makes without any of the file's, such as an identity matrix."""

    places = ()

    def __init__(self, value: torch.Tensor, dtype: torch.dtype) -> None:
        self._value = value.to(dtype).contiguous()
        self.dtype, self.shape = dtype, tuple(value.shape)

    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        yield byte_view(self._value)


def _inputs(tensor: RecordedTensor) -> list[RecordedTensor]:
    if isinstance(tensor.origin, TensorLocation):
        return []
    values, _ = tree_flatten((tensor.origin.args, tensor.origin.kwargs))
    return [value for value in values if isinstance(value, RecordedTensor)]


def _places(tensor: RecordedTensor) -> Iterator[TensorLocation]:
    if isinstance(tensor.origin, TensorLocation):
        yield tensor.origin
    for value in _inputs(tensor):
        yield from _places(value)


def _stretches(tensor: RecordedTensor) -> list[Extent] | None:
    """Where the file has the bytes of `tensor`, in its order; None where they have to be computed."""
    step = tensor.origin
    if isinstance(step, RecordedStep) and step.operation is _CAT and (step.args[1:] or (0,)) == (0,):
        parts = [_stretches(part) if part.dtype == tensor.dtype else None for part in _inputs(tensor)]
        whole = len(parts) == len(step.args[0]) and None not in parts
        return [extent for part in parts for extent in part or ()] if whole else None
    place = _viewed(tensor)
    if place is None or not tensor.is_contiguous():
        return None
    begin = place.offset + int(tensor.shape_only.storage_offset()) * tensor.dtype.itemsize
    return [Extent(place.path, begin, tensor.numel() * tensor.dtype.itemsize, place.state)]


def _viewed(tensor: RecordedTensor) -> TensorLocation | None:
    """The stored tensor that `tensor` is a view of."""
    storage = tensor.shape_only.untyped_storage()._cdata
    while isinstance(tensor.origin, RecordedStep):
        sources = [each for each in _inputs(tensor) if each.shape_only.untyped_storage()._cdata == storage]
        if not sources:
            return None
        tensor = sources[0]
    return tensor.origin


def _read(place: TensorLocation, reader: ChunkReader) -> torch.Tensor:
    strides = torch.empty(place.shape, device="meta").stride()
    stored = FileTensor(place.path, place.offset, place.dtype, torch.Size(place.shape), strides, place.state)
    return read_stored(stored, reader.disk)


def _evaluate(
    value: RecordedTensor, read: Callable[[TensorLocation], torch.Tensor], known: dict[TensorLocation, torch.Tensor]
) -> torch.Tensor:
    """Compute `value`; each stored tensor is read once."""
    step = value.origin
    if isinstance(step, TensorLocation):
        if step not in known:
            known[step] = read(step)
        return known[step]

    def of(each: Any) -> Any:
        return _evaluate(each, read, known) if isinstance(each, RecordedTensor) else each

    made = step.operation(*tree_map(of, step.args), **tree_map(of, step.kwargs))
    result: torch.Tensor = made if step.number is None else made[step.number]
    return result
