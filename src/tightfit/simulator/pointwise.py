"""Index divisions of torch's pointwise kernels, which they do where operands are laid out differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["element_divisions"]

aten = torch.ops.aten
_COPIES = {aten.clone, aten.copy_, aten._to_copy}  # pointwise, but not tagged so
TRANSPOSED = 2  # how much longer a division takes, see `element_divisions`


def element_divisions(op: torch._ops.OpOverload, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Return how many index divisions a pointwise kernel does, elements × dimensions; of other kernels 0.

    Where all operands fill memory in the same way, torch loads several elements at once (`gpu_kernel_impl` in
    cuda/CUDALoops.cuh). Else each element's index is divided by the length of each dimension but one, of those that
    are left when dimensions that are contiguous in all operands are merged. Where an operand has its dimensions in
    another order than the output, a division counts twice: a transposing copy of half precision moved 692 GB/s on a
    GH200 (https://github.com/pytorch/pytorch/pull/194310), 0.66 elements of each multiprocessor a clock.
    """
    if not outputs or (torch.Tag.pointwise not in op.tags and op.overloadpacket not in _COPIES):
        return 0
    lengths = outputs[0].shape
    strides = [_strides(each, lengths) for each in (*outputs[:1], *inputs)]
    order = sorted((place for place, length in enumerate(lengths) if length > 1), key=lambda place: strides[0][place])
    dimensions = _merged(order, lengths, strides)
    if dimensions == 1 and all(each[order[0]] == 1 for each in strides):
        return 0
    transposed = any(_is_transposed([each[place] for place in order]) for each in strides)
    return lengths.numel() * max(dimensions - 1, 1) * (TRANSPOSED if transposed else 1) if dimensions else 0


def _strides(tensor: torch.Tensor, lengths: torch.Size) -> list[int]:
    """Strides of `tensor` as expanded to `lengths`."""
    own = [stride if length > 1 else 0 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [0] * (len(lengths) - len(own)) + own


def _merged(order: Sequence[int], lengths: torch.Size, strides: Sequence[Sequence[int]]) -> int:
    """How many dimensions are left of those in `order`, the one of the smallest stride first."""
    left, inner, length = 0, 0, 0
    for place in order:
        if left and all(each[place] == each[inner] * length for each in strides):
            length *= lengths[place]
        else:
            left, inner, length = left + 1, place, lengths[place]
    return left


def _is_transposed(strides: Sequence[int]) -> bool:
    """Whether strides, in the output's order, do not grow; those of 0, where an operand is expanded, aside."""
    own = [stride for stride in strides if stride]
    return own != sorted(own)
