"""Whether two ways of computing something agree. On a pretend card that knows only shapes, they are taken to."""

from __future__ import annotations

import torch

from tightfit.errors import RunError

__all__ = ["agree", "are_equal"]


def agree(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether the two are of one shape and nowhere further apart than `tolerance` times the largest number."""
    if one.shape != other.shape:
        return False
    if one.numel() == 0:
        return True
    try:
        return bool(((one - other).abs().max() <= tolerance * other.abs().max()).item())
    except RunError:  # there are no numbers
        return True


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two have the same dtype, place, shape and values; not where there are no values."""
    try:
        alike = one.dtype == other.dtype and one.device == other.device
        return alike and torch.equal(one, other)
    except RunError:  # there are no numbers
        return False
