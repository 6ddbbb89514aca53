"""What SeaCache compares from step to step: the network's input after a filter that removes the noise of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline
from tightfit.apply.activations.caches.spectra import filtered, noise_removing_gain
from tightfit.apply.activations.caches.step_counter import DenoiserCall, call_inputs
from tightfit.apply.activations.caches.token_grid import frames_axis, token_grid
from tightfit.schema.step_cache import StepCache

__all__ = ["FilteredInput", "NotFilteredError"]

PICTURE, CLIP = 2.0, 3.0  # exponents of their power over the frequency, in SeaCache's programs


class NotFilteredError(Exception):
    """There is no noise level, or the tokens have no rows and columns."""


class FilteredInput:
    """Filters what calls of one network are given: their latents, or the tokens of the first attention.

    Tokens are filtered over the grid of the picture that they are (`token_grid`), which is looked for once in a call of
    the pipeline.
    """

    def __init__(self, settings: StepCache, pipeline: DenoisingPipeline) -> None:
        self._settings, self._pipeline = settings, pipeline
        self._grids: dict[int, tuple[int, ...] | None] = {}

    def clear(self) -> None:
        """Begin another call of the pipeline."""
        self._grids.clear()

    def begin(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: DenoiserCall) -> None:
        """Begin a call of the network."""
        self._call, self._given = call, call_inputs(network, args, kwargs)
        channels = getattr(getattr(network, "config", None), "in_channels", None)
        self._channels = channels if isinstance(channels, int) else None

    def end(self) -> None:
        """End the call in progress."""
        self._given = {}

    def latents(self) -> torch.Tensor:
        """Return the latents of the call in progress, filtered. Raises NotFilteredError."""
        latents = next(iter(self._given.values()), None)
        if not isinstance(latents, torch.Tensor) or not latents.is_floating_point():
            raise NotFilteredError("its first argument is not a tensor of latents")
        if latents.ndim == 3:
            return self.tokens(latents)
        if latents.ndim not in (4, 5):
            raise NotFilteredError(f"latents of {tuple(latents.shape)} have no rows and columns")
        axes = [latents.ndim - 2, latents.ndim - 1]
        if latents.ndim == 5:
            axes.insert(0, frames_axis(latents, self._channels))
        return self._filtered(latents, axes)

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `tokens` (items, tokens, channels) of the call in progress, filtered. Raises NotFilteredError."""
        if tokens.ndim != 3:
            raise NotFilteredError(
                f"its first attention is given {tokens.ndim} dimensions, not (items, tokens, channels)"
            )
        count = tokens.shape[1]
        if count not in self._grids:
            self._grids[count] = token_grid(count, self._given, self._channels)
        grid = self._grids[count]
        if grid is None:
            raise NotFilteredError(
                f"none of its arguments shows the rows and columns of its {count} tokens: set filters=latents"
            )
        whole = tokens.reshape(len(tokens), *grid, tokens.shape[2])
        return self._filtered(whole, range(1, 1 + len(grid))).flatten(1, len(grid))

    def _filtered(self, tensor: torch.Tensor, axes: Any) -> torch.Tensor:
        level = self._pipeline.noise_level(self._call)
        if level is None:
            raise NotFilteredError("the pipeline's scheduler shows no noise level")
        exponent = self._settings.value("exponent")
        if exponent is None:
            exponent = CLIP if len(axes) == 3 else PICTURE
        return filtered(tensor, noise_removing_gain(tensor, tuple(axes), level, exponent), tuple(axes))
