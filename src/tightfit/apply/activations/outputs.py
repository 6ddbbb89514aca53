"""Outputs of autoencoder methods → their tensors, and back: plain tensors, tuples, diffusers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, IdentityDistribution
from diffusers.utils import BaseOutput

__all__ = ["combine", "take_apart"]


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
