"""What autoencoder methods return, taken apart and put together: plain tensors, tuples, diffusers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput

__all__ = ["combine"]


def combine(outputs: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """One output made of several of the same kind, their tensors joined by `join`.

    Knows tensors, tuples, diffusers' output classes and Gaussian latents; anything else raises TypeError.
    """
    first = outputs[0]
    match first:
        case None:
            return None
        case torch.Tensor():
            return join(list(outputs))
        case DiagonalGaussianDistribution():
            joined = join([output.parameters for output in outputs])
            return DiagonalGaussianDistribution(joined, deterministic=first.deterministic)
        case BaseOutput():  # an ordered dict of its fields
            return type(first)(**{key: combine([output[key] for output in outputs], join) for key in first})
        case tuple() | list():
            return type(first)(combine(parts, join) for parts in zip(*outputs, strict=True))
    raise TypeError(f"an autoencoder returned {type(first).__name__}, which nobody here knows how to join")
