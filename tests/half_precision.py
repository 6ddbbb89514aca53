"""How many times as far from float32 one way to compute in half precision is as another one, and how sure that is."""

from __future__ import annotations

import math

import torch

FARTHER = 1.02  # times as far from float32 as whole execution is: how far half precision may be
SURE = 0.005  # the standard error up to which that is measured, where two of them reach beyond what may be


def is_sure(found: tuple[float, float]) -> bool:
    """Whether a ratio and its standard error need no more inputs."""
    ratio, uncertain = found
    return uncertain <= SURE or ratio + 2 * uncertain <= FARTHER


def squares_of_error(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Sums of squared differences, of parts of each item."""
    assert found.shape == exact.shape
    parts = (found.double() - exact.double()).square().chunk(8, -1)
    return torch.cat([part.flatten(1).sum(1) for part in parts])


def error_ratio(squares: torch.Tensor, of_whole: torch.Tensor) -> tuple[float, float]:
    """By what factor the one distance is larger than the other, and its standard error as the parts tell it."""
    if not squares.isfinite().all():
        return math.inf, 0.0
    if not squares.sum() and not of_whole.sum():
        return 1.0, 0.0
    ratio = squares.sum() / of_whole.sum()
    error = (squares - ratio * of_whole).square().sum().sqrt() / of_whole.sum()
    return math.sqrt(ratio), float(error / (2 * ratio.sqrt()))
