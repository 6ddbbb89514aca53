"""What a step cache reads of the pipeline that calls its network: number of steps, noise levels, guidance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tightfit.apply.activations.caches.step_counter import DenoiserCall

__all__ = ["DenoisingPipeline", "NoiseLevel"]


@dataclass(frozen=True)
class NoiseLevel:
    """What latents are made of at a step: `signal` times the picture and `noise` times noise of variance 1."""

    signal: float
    noise: float


@dataclass(frozen=True)
class DenoisingPipeline:
    """`pipe` returns the pipeline, or the network if there is none. Calls of the network see whole batches, each that
    of one call of the pipeline's, if `whole_batches`.
    """

    pipe: Callable[[], Any]
    whole_batches: bool = True

    def steps(self) -> int | None:
        """Return how many steps the pipeline's call takes; None if that is not known."""
        found = getattr(self.pipe(), "_num_timesteps", None)  # which diffusers' pipelines set before their loop
        return found if isinstance(found, int) else None

    def guided(self) -> bool | None:
        """Return whether the pipeline makes two predictions in a step; None if it does not say."""
        found = getattr(self.pipe(), "do_classifier_free_guidance", None)
        return found if isinstance(found, bool) else None

    def noise_level(self, call: DenoiserCall) -> NoiseLevel | None:
        """Return the noise level of the latents that `call` is given; None if the scheduler shows none."""
        scheduler = getattr(self.pipe(), "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None:
            return None
        index = _index(scheduler, len(timesteps), call)
        sigmas, products = getattr(scheduler, "sigmas", None), getattr(scheduler, "alphas_cumprod", None)
        if sigmas is not None and index < len(sigmas):
            sigma = float(sigmas[index])
            if _flows(scheduler, sigmas):
                return NoiseLevel(1.0 - sigma, sigma)
            scale = 1.0 / math.sqrt(1.0 + sigma**2)  # of the network's input, or of the latents themselves
            return NoiseLevel(scale, sigma * scale)
        if products is not None and index < len(timesteps):
            product = float(products[int(timesteps[index])])
            return NoiseLevel(math.sqrt(product), math.sqrt(1.0 - product))
        return None


def _index(scheduler: Any, count: int, call: DenoiserCall) -> int:
    """Return which of the scheduler's `count` timesteps `call` is for; pipelines that begin halfway take the last."""
    for name in ("step_index", "begin_index"):
        found = getattr(scheduler, name, None)
        if isinstance(found, int):
            return found
    return (max(count - call.steps, 0) if call.steps is not None else 0) + call.step


def _flows(scheduler: Any, sigmas: Any) -> bool:
    """Whether latents are a straight line between picture and noise, so that sigma is the share of the noise."""
    config = getattr(scheduler, "config", {})
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        return True
    return getattr(scheduler, "alphas_cumprod", None) is None and float(max(sigmas)) <= 1.0
