"""What calls with the same work have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

__all__ = ["call_signature"]


def call_signature(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments of a call, and of tensors shape and dtype."""
    leaves, structure = tree_flatten((args, kwargs))
    shapes = ((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    return (str(structure), *shapes)
