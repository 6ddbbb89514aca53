"""Autoencoders tile by tile: overlapping tiles, each on its own, blended by linear ramps where they meet.

Lossy where it really tiles: normalisation sees one tile at a time and borders are padded inside the
picture. A picture that fits into one tile passes through untouched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tightfit.apply.activations.outputs import combine

__all__ = ["tile_starts", "tiled"]


def tiled(
    method: Callable[..., Any], tile: int, overlap: float, granule: int, report: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """`method` over tiles of `tile` positions of its input (..., height, width), neighbours sharing `overlap` of one.

    Sound, of three dimensions, is done whole. Tiles begin at multiples of `granule`, so that what they become begins at
    whole positions too. `report` is told when there is more than one tile.
    """

    def run(whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        height, width = whole.shape[-2:]
        if (height <= tile and width <= tile) or whole.ndim < 4:
            return method(whole, *args, **kwargs)
        report()
        rows = tile_starts(height, tile, overlap, granule)
        columns = tile_starts(width, tile, overlap, granule)
        corners = list(itertools.product(rows, columns))
        outputs = [method(whole[..., y : y + tile, x : x + tile], *args, **kwargs) for y, x in corners]
        return combine(outputs, lambda tiles: _blend(tiles, corners, min(height, tile), (height, width)))

    return run


def tile_starts(length: int, tile: int, overlap: float, granule: int) -> list[int]:
    """Where tiles of `tile` positions begin so that they cover `length`; the last one ends with it."""
    if length <= tile:
        return [0]
    stride = max(granule, int(tile * (1 - overlap)) // granule * granule)
    starts = list(range(0, length - tile, stride))
    return [*starts, length - tile]


def _blend(
    tiles: list[torch.Tensor], corners: list[tuple[int, int]], tile_height: int, size: tuple[int, int]
) -> torch.Tensor:
    """The whole map from `tiles` whose inputs began at `corners` of a map of `size`."""
    grown = tiles[0].shape[-2] / tile_height  # output positions per input position

    def out(position: int) -> int:
        return round(position * grown)

    height, width = out(size[0]), out(size[1])
    total = tiles[0].new_zeros((*tiles[0].shape[:-2], height, width), dtype=torch.float32)
    weight = torch.zeros((height, width), dtype=torch.float32, device=total.device)
    for tile, (y, x) in zip(tiles, corners, strict=True):
        top, left = out(y), out(x)
        here = (..., slice(top, top + tile.shape[-2]), slice(left, left + tile.shape[-1]))
        window = _ramp(tile.shape[-2], total.device)[:, None] * _ramp(tile.shape[-1], total.device)[None, :]
        total[here] += tile * window
        weight[here[1:]] += window
    return total.div_(weight).to(tiles[0].dtype)


def _ramp(length: int, device: torch.device) -> torch.Tensor:
    """Weights that rise from the edges of a tile to its middle, never zero."""
    distance = torch.arange(1, length + 1, dtype=torch.float32, device=device)
    return torch.minimum(distance, distance.flip(0))
