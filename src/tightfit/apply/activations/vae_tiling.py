"""An autoencoder's encode and decode in strips, in blended tiles or one item at a time, as a plan says."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.outputs import combine, take_apart
from tightfit.apply.activations.strips.executor import NeedsWholeBatch, StripExecutor
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import VaePlan

__all__ = ["pixels_per_latent", "sliced", "tile_starts", "tiled", "wrap_vae_methods"]


def sliced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `method` (an autoencoder's `encode` or `decode`) to run on one item of its first dimension at a time.

    It runs whole if that dimension holds the frames of clips, which belong together (`num_frames` is given), or if it
    returns a scalar for all items, such as a loss; this is seen at the first item.
    """

    def run(whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count = whole.shape[0]
        if count == 1 or kwargs.get("num_frames", 1) != 1:
            return method(whole, *args, **kwargs)

        def item(value: Any, index: int) -> Any:
            goes_along = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == count
            return value[index : index + 1] if goes_along else value

        def output(index: int) -> Any:
            others = {key: item(value, index) for key, value in kwargs.items()}
            return method(whole[index : index + 1], *(item(value, index) for value in args), **others)

        first = output(0)
        if any(tensor.ndim == 0 for tensor in take_apart(first)[0]):
            return method(whole, *args, **kwargs)
        return combine([first, *map(output, range(1, count))], torch.cat)

    return run


def tiled(
    method: Callable[..., Any], tile: int, overlap: float, granule: int, report: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """Wrap `method` to run on tiles of `tile` positions of its input (..., height, width), then blend the outputs.

    Neighbouring tiles share the fraction `overlap`. Tiles begin at multiples of `granule`, so that their outputs begin
    at whole positions. Audio (three dimensions) runs whole. `report` is called if there is more than one tile.
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
    """Return the start positions of tiles of `tile` positions that cover `length`; the last tile ends there."""
    if length <= tile:
        return [0]
    stride = max(granule, int(tile * (1 - overlap)) // granule * granule)
    starts = list(range(0, length - tile, stride))
    return [*starts, length - tile]


def _blend(
    tiles: list[torch.Tensor], corners: list[tuple[int, int]], tile_height: int, size: tuple[int, int]
) -> torch.Tensor:
    """Blend `tiles`, whose inputs began at `corners` of an input of `size`, into the whole output."""
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
    """Blending weights that rise from the edges of a tile to its middle; never zero."""
    distance = torch.arange(1, length + 1, dtype=torch.float32, device=device)
    return torch.minimum(distance, distance.flip(0))


Method = Callable[..., Any]


def wrap_vae_methods(
    original: type[nn.Module], plan: VaePlan, device: Device, recorder: Recorder, undo: ExitStack
) -> dict[str, Method]:
    """Return the methods "encode" and "decode" of the class `original`, following `plan`; `undo` frees what they hold.

    They run in strips if that is planned and possible; otherwise in tiles if these are allowed; otherwise whole.
    """
    strips = None
    if plan.strips is not None:
        strips = StripExecutor(original, plan.strips, plan.feature_maps, device, recorder)
        undo.callback(strips.close)
    methods = [method for method in ("encode", "decode") if hasattr(original, method)]  # some classes only decode
    return {method: _cut(getattr(original, method), method, plan, strips, recorder) for method in methods}


def _cut(plain: Method, method: str, plan: VaePlan, strips: StripExecutor | None, recorder: Recorder) -> Method:
    first = list(inspect.signature(plain).parameters)[1]

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
        bound: Method = functools.partial(plain, self)
        if plan.tile is not None:
            factor = pixels_per_latent(self)
            granule, tile = (factor, plan.tile) if method == "encode" else (1, max(plan.tile // factor, 1))
            tile = max(tile // granule, 1) * granule
            told = f"blended-tiling: {method}d in tiles of {plan.tile} px"
            bound = tiled(bound, tile, plan.overlap, granule, lambda: recorder.lossy(told))
        if strips is None or _differentiates(self, args, recorder, method):
            return (sliced(bound) if plan.slicing else bound)(*args, **kwargs)
        try:
            return sliced(strips.bound(self, method, bound, alone=len(args[0]) == 1))(*args, **kwargs)
        except NeedsWholeBatch:
            return strips.bound(self, method, bound)(*args, **kwargs)

    return functools.wraps(plain)(run)


def _differentiates(autoencoder: nn.Module, args: tuple[Any, ...], recorder: Recorder, method: str) -> bool:
    """Whether the result needs a graph for gradients, which strips do not make; reported."""
    if not torch.is_grad_enabled():
        return False
    needs = any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *autoencoder.parameters()))
    if needs:
        recorder.note(f"{method}d whole, because gradients were asked for: strips are for calls under torch.no_grad()")
    return needs


def pixels_per_latent(autoencoder: Any) -> int:
    """Return the number of pixels per latent position along one dimension."""
    ratio = getattr(autoencoder, "spatial_compression_ratio", None)
    if isinstance(ratio, int):
        return ratio
    config = autoencoder.config
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(config.get(name), int):
            return int(config[name])
    channels = config.get("block_out_channels") or config.get("encoder_block_out_channels") or (0,)
    patch = config.get("patch_size") or 1  # a pair (FLUX.2's) is for packing by the pipeline, outside the network
    return int(2 ** (len(channels) - 1) * (patch if isinstance(patch, int) else 1))
