"""An autoencoder's encode and decode in strips, tiles and slices, as the plan says."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from tightfit.apply.activations.slicing import sliced
from tightfit.apply.activations.strips.method import NotAlone, StripExecutor
from tightfit.apply.activations.tiling import tiled
from tightfit.devices.seam import Device
from tightfit.measure.recorder import Recorder
from tightfit.records import VaePlan

__all__ = ["cut_up", "pixels_per_latent"]

Method = Callable[..., Any]


def cut_up(
    original: type[nn.Module], plan: VaePlan, device: Device, recorder: Recorder, undo: ExitStack
) -> dict[str, Method]:
    """The methods "encode" and "decode" of the class `original`, following `plan`; `undo` gives up what they hold.

    In strips where that is asked for and possible; otherwise in tiles, where those are allowed; otherwise whole.
    """
    strips = None
    if plan.strips is not None:
        strips = StripExecutor(original, plan.strips, plan.feature_maps, device, recorder)
        undo.callback(strips.close)
    methods = [method for method in ("encode", "decode") if hasattr(original, method)]  # some only decode
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
        if strips is None:
            return (sliced(bound) if plan.slicing else bound)(*args, **kwargs)
        try:
            return sliced(strips.bound(self, method, bound, alone=len(args[0]) == 1))(*args, **kwargs)
        except NotAlone:
            return strips.bound(self, method, bound)(*args, **kwargs)

    return functools.wraps(plain)(run)


def pixels_per_latent(autoencoder: Any) -> int:
    """How many pixels, one way, become one latent position."""
    ratio = getattr(autoencoder, "spatial_compression_ratio", None)
    if isinstance(ratio, int):
        return ratio
    config = autoencoder.config
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(config.get(name), int):
            return int(config[name])
    channels = config.get("block_out_channels") or config.get("encoder_block_out_channels") or (0,)
    patch = config.get("patch_size") or 1  # a pair (FLUX.2's) is what the pipeline packs, outside of the network
    return int(2 ** (len(channels) - 1) * (patch if isinstance(patch, int) else 1))
