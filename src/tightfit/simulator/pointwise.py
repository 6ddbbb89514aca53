"""How many divisions torch's pointwise kernels do to find their elements, where operands are laid out differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["element_divisions"]

aten = torch.ops.aten
_COPIES = {aten.clone, aten.copy_, aten._to_copy}  # pointwise, but not tagged so
TURNED = 2  # see below


def element_divisions(op: torch._ops.OpOverload, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Return in how many elements and dimensions a pointwise kernel looks for its operands; 0 if it need not.

    Where all operands fill memory in the same way, torch loads several elements at once (`gpu_kernel_impl` in
    cuda/CUDALoops.cuh). Else each element's index is divided by the lengths of the dimensions, but the last, that are
    left when those that lie behind one another are joined. Where an operand has dimensions in another order than the
    output, all counts twice: a transposing copy of half precision moved 692 GB/s on a GH200
    (https://github.com/pytorch/pytorch/pull/194310), 0.66 elements of each multiprocessor a clock.
    """
    if not outputs or (torch.Tag.pointwise not in op.tags and op.overloadpacket not in _COPIES):
        return 0
    lengths = outputs[0].shape
    strides = [_strides(each, lengths) for each in (*outputs[:1], *inputs)]
    order = sorted((place for place, length in enumerate(lengths) if length > 1), key=lambda place: strides[0][place])
    dimensions = _joined(order, lengths, strides)
    if dimensions == 1 and all(each[order[0]] == 1 for each in strides):
        return 0
    turned = any(_is_turned([each[place] for place in order]) for each in strides)
    return lengths.numel() * max(dimensions - 1, 1) * (TURNED if turned else 1) if dimensions else 0


def _strides(tensor: torch.Tensor, lengths: torch.Size) -> list[int]:
    """Strides of `tensor` as expanded to `lengths`."""
    own = [stride if length > 1 else 0 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [0] * (len(lengths) - len(own)) + own


def _joined(order: Sequence[int], lengths: torch.Size, strides: Sequence[Sequence[int]]) -> int:
    """How many dimensions are left of those in `order`, the fastest first."""
    left, inner, length = 0, 0, 0
    for place in order:
        if left and all(each[place] == each[inner] * length for each in strides):
            length *= lengths[place]
        else:
            left, inner, length = left + 1, place, lengths[place]
    return left


def _is_turned(strides: Sequence[int]) -> bool:
    """Whether strides do not grow, those aside along which an operand is expanded."""
    own = [stride for stride in strides if stride]
    return own != sorted(own)
