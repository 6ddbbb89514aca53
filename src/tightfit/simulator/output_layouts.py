"""Strides of the outputs of CUDA's kernels, where torch's meta functions return other ones.

The meta functions are Python, written after the kernels, and differ from them where several strides describe the same
layout: a dimension of size 1 may have any stride. Such a stride decides what a convolution regards as channels-last,
and so how many bytes it allocates. The rules are ATen's (torch 2.11 to 2.15): TensorIterator.cpp,
TensorAdvancedIndexing.cpp and MemoryFormat.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tightfit.simulator.native_functions import pointwise_kernels

__all__ = ["GROUP_NORM_KEEPS_CHANNELS_LAST", "is_dense", "laid_out", "normed_by_cudnn", "suggested"]

_aten = torch.ops.aten
_Strides = tuple[int, ...]
_Rule = Callable[..., _Strides]
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def laid_out(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return `result` of `op`, on "meta" or the CPU, with the strides that CUDA's kernel gives it."""
    rule = _RULES.get(op) or _RULES.get(op.overloadpacket) or (_pointwise if op in pointwise_kernels() else None)
    if rule is None:
        return result
    if isinstance(result, torch.Tensor):
        return _restrided(result, rule(result, op, args, kwargs))
    if isinstance(result, tuple | list):
        return type(result)(_restrided(value, rule(value, op, args, kwargs)) for value in result)
    return result


def _restrided(result: torch.Tensor, strides: _Strides) -> torch.Tensor:
    if strides == result.stride():
        return result
    made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return made if result.is_meta else made.copy_(result)


def contiguous(shape: Sequence[int]) -> _Strides:
    """Strides of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        strides[place] = strides[place + 1] * max(shape[place + 1], 1)
    return tuple(strides)


def suggested(tensor: torch.Tensor) -> torch.memory_format:
    """The result of `suggest_memory_format` in C++: from strides alone, also those of dimensions of size 1."""
    layout, order = _CHANNELS_LAST.get(tensor.ndim, (torch.contiguous_format, ()))
    shape, strides = tensor.shape, tensor.stride()
    least = 0
    if not order or strides[1] == 0:
        return torch.contiguous_format
    for place in order:
        if shape[place] == 0 or strides[place] < least or (place == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[place] * max(shape[place], 1)
    return layout


_CHANNELS_LAST: dict[int, tuple[torch.memory_format, tuple[int, ...]]] = {
    4: (torch.channels_last, (1, 3, 2, 0)),
    5: (torch.channels_last_3d, (1, 4, 3, 2, 0)),
}


def in_format(shape: Sequence[int], layout: torch.memory_format) -> _Strides:
    """Strides of a new tensor of `shape` in the memory format `layout`."""
    return torch.empty(shape, memory_format=layout, device="meta").stride()


def _together(*shapes: Sequence[int]) -> torch.Size:
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call,no-any-return]


# rules


def _pointwise(
    result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Strides:
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    operands += [value for name, value in kwargs.items() if name != "out" and isinstance(value, torch.Tensor)]
    shape = _together(*(operand.shape for operand in operands))
    if shape != result.shape:  # a reduction
        return result.stride()
    return _walked(shape, operands, numbers=_has_number(op, args))


def _gated(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    return _walked(result.shape, args[0].chunk(2, args[1] if len(args) > 1 else -1), numbers=False)


def _walked(shape: Sequence[int], operands: Sequence[torch.Tensor], *, numbers: bool) -> _Strides:
    quick = _quick(operands, numbers=numbers)
    return iterated(shape, [(each.shape, each.stride()) for each in operands]) if quick is None else quick


def _has_number(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a Python number is passed in place of a 0-dim tensor."""
    return any(
        not isinstance(value, torch.Tensor) and (str(wanted.type) == "Tensor" or wanted.name == "other")
        for value, wanted in zip(args, op._schema.arguments, strict=False)
    )


def _quick(operands: Sequence[torch.Tensor], *, numbers: bool) -> _Strides | None:
    """Strides where all operands have one shape and layout (`compute_fast_setup_type`); None where they do not."""
    first = operands[-1]
    if (numbers and first.ndim) or any(each.shape != first.shape for each in operands):
        return None
    if all(each.is_contiguous() for each in operands):
        return contiguous(first.shape)
    if first.ndim == 4 and all(each.is_contiguous(memory_format=torch.channels_last) for each in operands):
        return in_format(first.shape, torch.channels_last)
    alike = all(each.stride() == first.stride() for each in operands)
    return first.stride() if alike and is_dense(first.shape, first.stride()) else None


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill the memory without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for stride, length in sorted((stride, length) for stride, length in zip(strides, shape, strict=True) if length > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def iterated(shape: Sequence[int], operands: Iterable[tuple[Sequence[int], Sequence[int]]]) -> _Strides:
    """Strides of the output of a TensorIterator over `operands`, (shape, strides) pairs, broadcast to `shape`."""
    count = len(shape)
    steps = [_broadcast(shape, *operand) for operand in operands]
    order = list(reversed(range(count)))  # innermost dimension first

    def compared(left: int, right: int) -> int:
        for strides in steps:
            one, other = strides[left], strides[right]
            if not one or not other:
                continue
            if one != other:
                return 1 if one > other else -1
            if shape[left] > shape[right]:
                return 1
        return 0

    for start in range(1, count):  # an insertion sort that continues past ambiguous comparisons
        place = start
        for before in range(start - 1, -1, -1):
            comparison = compared(order[before], order[place])
            if comparison > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif comparison < 0:
                break
    if order == list(reversed(range(count))):
        return contiguous(shape)
    found, step = [0] * count, 1
    for place in order:
        found[place] = step
        step *= shape[place]
    return tuple(found)


def _broadcast(shape: Sequence[int], own: Sequence[int], strides: Sequence[int]) -> list[int]:
    missing = len(shape) - len(own)
    whole = [
        0 if length == 1 != wanted else stride
        for length, stride, wanted in zip(own, strides, shape[missing:], strict=True)
    ]
    return [0] * missing + whole


def _contiguous(result: torch.Tensor, *_: Any) -> _Strides:
    return contiguous(result.shape)


def _like_input(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    """Strides of `empty_like`, whose function for "meta" differs from that of all other devices."""
    first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    if result.shape != first.shape:
        return result.stride()
    made: torch.Tensor = _aten.empty_like.default.redispatch(CPU_KEYS, first)
    return made.stride()


def _as_suggested(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    return in_format(result.shape, suggested(args[0]))


def _convolved(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    """Channels-last where input or weights are: the rule of cuDNN and oneDNN (aten/src/ATen/native/ConvUtils.h)."""
    for part in args[:2]:
        layout = suggested(part)
        if layout is not torch.contiguous_format:
            return in_format(result.shape, layout)
    return result.stride()


def _indexed(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    """Strides of advanced indexing: the index dimensions replace the indexed ones if adjacent, or else come first."""
    source, indices = args
    given = [place for place, index in enumerate(indices) if index is not None]
    if any(indices[place].dtype in (torch.bool, torch.uint8) for place in given):
        return result.stride()
    if given != list(range(given[0], given[-1] + 1)):
        rest = [place for place in range(source.ndim) if place not in given]
        source, given = source.permute(*given, *rest), list(range(len(given)))
        indices = [index for index in indices if index is not None]
    positions = [index for index in indices if index is not None]
    there = _together(*(index.shape for index in positions))
    first, last = given[0], given[-1] + 1
    shape = (*source.shape[:first], *there, *source.shape[last:])
    taken = (*source.stride()[:first], *(0 for _ in there), *source.stride()[last:])
    spread = [index.expand(there)[(None,) * first + (..., *(None,) * (source.ndim - last))] for index in positions]
    return iterated(shape, [(shape, taken), *((index.shape, index.stride()) for index in spread)])


GROUP_NORM_KEEPS_CHANNELS_LAST = torch.__version__ >= "2.15"  # on CUDA


def _normed(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    if result.shape != args[0].shape:
        return result.stride()  # mean and inverse deviation of the groups
    if GROUP_NORM_KEEPS_CHANNELS_LAST:
        return _as_suggested(result, op, args, _)
    return contiguous(result.shape) if args[0].is_contiguous() else result.stride()


def normed_by_cudnn(args: tuple[Any, ...]) -> bool:
    """Whether batch norm uses cuDNN, `_select_batch_norm_backend` in aten/src/ATen/native/Normalization.cpp."""
    maps, *others = args[:5]
    in_float32 = all(each is not None and each.dtype is torch.float32 for each in others)
    return in_float32 and maps.ndim > 2 and maps.dtype in (torch.float16, torch.float32)


def _batch_normed(result: torch.Tensor, op: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> _Strides:
    if result.shape == args[0].shape and normed_by_cudnn(args):
        return _as_suggested(result, op, args, _)
    return _like_input(result, op, args, _)


_RESIZES = (
    "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((getattr(_aten, name) for name in _RESIZES), _as_suggested),
    **dict.fromkeys((_aten._log_softmax, _aten.linalg_vector_norm, _aten.native_layer_norm), _contiguous),
    **dict.fromkeys((_aten._fused_rms_norm, _aten.tril, _aten.triu, _aten.pow.Scalar), _contiguous),
    **dict.fromkeys((_aten.flip, _aten.sort, _aten.log_sigmoid_forward, _aten.native_dropout), _like_input),
    _aten.hardtanh: _like_input,
    _aten.native_batch_norm: _batch_normed,
    _aten.convolution: _convolved,
    _aten.glu: _gated,
    _aten.index: _indexed,
    _aten.native_group_norm: _normed,
}
