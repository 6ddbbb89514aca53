"""What calls with step caches were like, beside the same calls without: a calibration. Does not import torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tightfit.errors import InputError
from tightfit.schema.base import Count, Positive, Real, Record
from tightfit.schema.step_cache import StepCache

__all__ = ["CacheCalibration", "CacheTrial"]

Share = Annotated[float, Field(ge=0, le=1)]
FAR = 0.25  # of the calibrated steps: calls of so many more or less are taken to be alike


class CacheTrial(Record):
    """Calls with one step cache, beside the same calls without: pictures, and what was left out."""

    cache: StepCache
    least_psnr: float | None  # dB, of the picture that differs most; None: all are the same
    mean_psnr: float | None  # dB, of the pictures that differ; None: there are none
    skipped_steps: tuple[Count, ...]  # those skipped most often, as many as in a call on average
    mean_skipped: Real  # how many that are
    seconds_share: Real  # seconds of denoising over those without a cache
    device_bytes: Count  # most bytes kept on the device
    host_bytes: Count = 0  # most bytes kept in host memory

    def within(self, quality: float) -> bool:
        """Whether no picture had a PSNR below `quality` dB."""
        return self.least_psnr is None or self.least_psnr >= quality


class CacheCalibration(Record):
    """Step caches that were tried on one pipeline, with the same calls."""

    error: ClassVar[type[InputError]] = InputError

    weights: tuple[float, ...]  # a few of the denoiser's, by which the pipeline is known again
    calls: Positive  # how many were compared
    steps: Positive  # denoising steps of each
    trials: tuple[CacheTrial, ...]

    def is_of(self, weights: tuple[float, ...]) -> bool:
        """Whether it is of a pipeline with these `weights`, except for rounding to another dtype."""
        pairs = zip(self.weights, weights, strict=True) if len(self.weights) == len(weights) else [(0.0, 1.0)]
        return all(abs(one - other) <= 0.02 * abs(one) + 1e-6 for one, other in pairs)

    def merged_with(self, earlier: CacheCalibration) -> CacheCalibration:
        """Return it with the trials of `earlier`, of the same pipeline and steps, of strategies that it has not."""
        own = {each.cache.strategy for each in self.trials}
        more = tuple(each for each in earlier.trials if each.cache.strategy not in own)
        calls = min(self.calls, earlier.calls) if more else self.calls
        return self.model_copy(update={"trials": (*self.trials, *more), "calls": calls})

    def is_for(self, steps: int) -> bool:
        """Whether calls of `steps` denoising steps are enough like its own."""
        return abs(steps - self.steps) <= FAR * self.steps

    def skipped_of(self, trial: CacheTrial, steps: int) -> tuple[int, ...]:
        """Return the steps that `trial` would skip in a call of `steps`."""
        scaled = {round(step * steps / self.steps) for step in trial.skipped_steps}
        return tuple(sorted(step for step in scaled if 0 < step < steps))
