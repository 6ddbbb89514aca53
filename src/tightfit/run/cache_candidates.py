"""Changes from step to step, as they were observed → settings of step caches that are worth trying."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tightfit.apply.activations.caches.step_changes import StepChanges
from tightfit.errors import InputError, unknown_name
from tightfit.schema.step_cache import STRATEGIES, StepCache

__all__ = ["candidates_for", "checked_strategies", "observing"]

INTERVALS = (2, 3, 4)
THRESHOLDS = {  # of each kind of decision, in medians of the changes from one step to the next
    "first blocks": (1.25, 2.0, 3.0),  # since the step that ran last
    "modulated input": (1.5, 2.5, 3.5),  # added up
    "filtered input": (1.5, 2.5, 3.5),
    "output rate": (1.5, 2.5, 3.5),
}
MAGNITUDES = (0.03, 0.06, 0.12)  # thresholds of the estimated error, which is relative to what blocks add
MOST_DEGREE, POINTS = 4, 3  # of TeaCache's polynomial; points for each of its coefficients


def checked_strategies(names: Sequence[str] | None) -> list[str]:
    """Return the lossy strategies `names` (None: all). InputError for unknown ones and those that lose nothing."""
    lossy = [name for name, kind in STRATEGIES.items() if not kind.lossless]
    for name in names or ():
        if name not in STRATEGIES:
            raise InputError(unknown_name("step cache", name, lossy), name=name)
        if name not in lossy:
            raise InputError(f"{name} changes no picture, and needs no calibration: try {', '.join(lossy)}", name=name)
    return lossy if names is None else list(dict.fromkeys(names))


def observing(strategy: str) -> list[StepCache]:
    """Return step caches that skip nothing, to observe changes with the first that suits; none if none is needed."""
    decides = STRATEGIES[strategy].decides
    if decides not in THRESHOLDS and decides != "magnitudes":
        return []
    forms = [{"filters": "tokens"}, {"filters": "latents"}] if decides == "filtered input" else [{}]
    return [StepCache(strategy=strategy, skipped_steps=(), **each) for each in forms]


def candidates_for(
    strategy: str, observed: Sequence[StepChanges], steps: int, filters: str | None = None
) -> list[StepCache]:
    """Return step caches of `strategy` for calls of `steps` denoising steps, those that skip fewest steps first.

    `observed` are changes in calls that skipped nothing, of what `filters` says, if the strategy filters.
    """
    decides = STRATEGIES[strategy].decides
    common = {**_shortened(strategy, steps), **({} if filters is None else {"filters": filters})}
    if decides == "interval":
        crossed = [{"cross_interval": interval} if strategy == "pab" else {} for interval in INTERVALS]
        pairs = zip(INTERVALS, crossed, strict=True)
        return [StepCache(strategy=strategy, interval=interval, **common, **more) for interval, more in pairs]
    if decides == "magnitudes":
        magnitudes = _mean_magnitudes(observed, steps)
        return [StepCache(strategy=strategy, magnitudes=magnitudes, threshold=each, **common) for each in MAGNITUDES]
    coefficients = _polynomial(observed) if decides == "modulated input" else None
    changes = [_rescaled(change, coefficients) for each in observed for change in each.compared.values()]
    if not changes:
        return []
    usual = max(statistics.median(changes), 1e-6)
    thresholds = [float(f"{usual * each:.2g}") for each in THRESHOLDS[decides]]
    given = {} if coefficients is None else {"coefficients": coefficients}
    return [StepCache(strategy=strategy, threshold=each, **given, **common) for each in thresholds]


def _shortened(strategy: str, steps: int) -> Mapping[str, Any]:
    """Return steps at the beginning that always run: a strategy's own are for calls of about 30, or of more."""
    usual = STRATEGIES[strategy].defaults.get("warm_up", 0)
    return {"warm_up": max(steps // 6, 1)} if usual > steps // 6 else {}


def _mean_magnitudes(observed: Sequence[StepChanges], steps: int) -> tuple[float, ...]:
    """Return for each step how much larger what is reused is than in the step before, on average."""
    found: list[float] = []
    for step in range(steps):
        ratios = [each.magnitudes[step] for each in observed if step in each.magnitudes]
        found.append(round(statistics.fmean(ratios), 5) if ratios else 1.0)
    return tuple(found)


def _polynomial(observed: Sequence[StepChanges]) -> tuple[float, ...] | None:
    """Return the polynomial from changes of the input to those of what is reused; None for too few points."""
    points = [
        (change, each.reused[step])
        for each in observed
        for step, change in each.compared.items()
        if step in each.reused
    ]
    degree = min(MOST_DEGREE, len(points) // POINTS - 1)
    if degree < 1:
        return None
    found = np.polyfit([x for x, _ in points], [y for _, y in points], degree)
    return tuple(float(f"{each:.6g}") for each in found)


def _rescaled(change: float, coefficients: Sequence[float] | None) -> float:
    return change if coefficients is None else float(np.polyval(coefficients, change))
