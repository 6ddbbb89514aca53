"""Outputs of networks → their tensors, and back: plain tensors, tuples, diffusers' outputs; and whether two agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, IdentityDistribution
from diffusers.utils import BaseOutput

from tightfit.errors import RunError

__all__ = ["agree", "are_equal", "combine", "take_apart"]


def combine(outputs: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Return one output made of several of the same kind; `join` makes each tensor from theirs.

    Takes tensors, tuples, lists, diffusers' output classes and Gaussian latents; TypeError for anything else.
    """
    apart = [take_apart(output) for output in outputs]
    tensors = zip(*(parts for parts, _ in apart), strict=True)
    return apart[0][1]([join(list(several)) for several in tensors])


def take_apart(output: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the tensors in `output`, and a function that makes an output of the same kind from as many other tensors.

    Takes tensors, tuples, lists, diffusers' output classes and Gaussian latents; TypeError for anything else.
    """
    match output:
        case None:
            return [], lambda tensors: None
        case torch.Tensor():
            return [output], lambda tensors: tensors[0]
        case DiagonalGaussianDistribution(deterministic=deterministic):
            return [output.parameters], lambda tensors: DiagonalGaussianDistribution(tensors[0], deterministic)
        case IdentityDistribution():
            return [output.parameters], lambda tensors: IdentityDistribution(tensors[0])
        case BaseOutput():  # an ordered dict of its fields
            values, together = take_apart(tuple(output.values()))
            return values, lambda tensors: type(output)(**dict(zip(output, together(tensors), strict=True)))
        case tuple() | list():
            apart = [take_apart(part) for part in output]

            def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
                left = iter(tensors)
                return type(output)(make([next(left) for _ in parts]) for parts, make in apart)

            return [tensor for parts, _ in apart for tensor in parts], rebuild
    raise TypeError(f"an autoencoder returned {type(output).__name__}, which cannot be joined")


def agree(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether both have the same shape and differ by at most `tolerance` times the largest absolute value of `other`.

    Simulated tensors without values agree if their shapes do.
    """
    if one.shape != other.shape:
        return False
    if one.numel() == 0:
        return True
    try:
        return bool(((one - other).abs().max() <= tolerance * other.abs().max()).item())
    except RunError:  # simulated tensors without values
        return True


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same dtype, device, shape and values; False for simulated tensors without values."""
    try:
        alike = one.dtype == other.dtype and one.device == other.device
        return alike and torch.equal(one, other)
    except RunError:  # simulated tensors without values
        return False
