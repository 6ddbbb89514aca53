"""Where tokens are in a picture or clip: the grid whose rows, one after another, a sequence of tokens is.

What a network is given shows it: latents with rows and columns, of which a token takes a square; numbers of frames,
rows and columns; or a table of each token's position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.errors import RunError

__all__ = ["frames_axis", "token_grid"]

PATCHES = (1, 2, 4, 8, 16)  # rows and columns of latents in a token
FRAMES = (1, 2, 4)  # and frames
AXES = range(2, 5)  # columns of a table of positions


def token_grid(tokens: int, given: Mapping[str, Any], channels: int | None) -> tuple[int, ...] | None:
    """Return the sizes of the grid of `tokens`, in the order of the axes: (frames, rows, columns) or fewer.

    `given` are the network's arguments, latents first, `channels` those of latents if they are known. None: no
    argument shows a grid.
    """
    first = next((leaf for leaf in tree_leaves(next(iter(given.values()), None)) if _floats(leaf)), None)
    grids = itertools.chain(
        _grids_of_latents(tokens, first, channels) if first is not None else (),
        _grids_of_numbers(given),
        _grids_of_tables(tokens, given),
        [(first.shape[2],)] if first is not None and first.ndim == 3 and first.shape[1] != tokens else [],
    )
    return next((grid for grid in grids if math.prod(grid) == tokens), None)


def frames_axis(latents: torch.Tensor, channels: int | None) -> int:
    """Return which axis of latents of five dimensions are frames: 1 or 2; the other one has `channels`."""
    return 1 if channels == latents.shape[2] != latents.shape[1] else 2


def _grids_of_latents(tokens: int, latents: torch.Tensor, channels: int | None) -> Iterator[tuple[int, ...]]:
    if latents.ndim not in (4, 5):
        return
    rows, columns = latents.shape[-2:]
    frames = latents.shape[frames_axis(latents, channels)] if latents.ndim == 5 else None
    for patch in PATCHES:
        if rows % patch or columns % patch:
            continue
        picture = (rows // patch, columns // patch)
        if frames is not None:  # first: of one frame, the picture's grid has as many tokens
            counts = [-(-frames // some) for some in FRAMES]
            yield from ((count, *picture) for count in counts if count > 1 or frames == 1)
        yield picture


def _grids_of_numbers(given: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    sizes = {name: value for name, value in given.items() if type(value) is int}
    picture = [sizes[name] for name in ("height", "width") if name in sizes]
    if len(picture) == 2:
        yield from ((frames, *picture) for name, frames in sizes.items() if name.endswith("frames"))
        yield (picture[0], picture[1])
    for value in given.values():
        yield from _tuples(value)


def _tuples(value: Any) -> Iterator[tuple[int, ...]]:
    """Yield the lists and tuples in `value` that are two or three numbers: sizes of pictures or clips."""
    if not isinstance(value, list | tuple):
        return
    if len(value) in (2, 3) and all(type(each) is int for each in value):
        yield tuple(value[1:] if len(value) == 3 and value[0] == 1 else value)
    for each in value:
        yield from _tuples(each)


def _grids_of_tables(tokens: int, given: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    for table in tree_leaves(dict(given)):
        if not isinstance(table, torch.Tensor) or table.ndim not in (2, 3) or table.shape[-2] != tokens:
            continue
        if table.shape[-1] not in AXES:
            continue
        try:
            columns = table.reshape(-1, table.shape[-1])[:tokens].float().cpu().unbind(1)
            sizes = tuple(len(set(column.tolist())) for column in columns)
        except RunError:  # a simulated table without values: what is computed with it takes as many bytes
            yield _square(tokens)
            continue
        yield tuple(size for size in sizes if size > 1)


def _square(tokens: int) -> tuple[int, int]:
    rows = next(size for size in range(math.isqrt(tokens), 0, -1) if tokens % size == 0)
    return rows, tokens // rows


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
