"""Step caches that a plan may use → the plan with the one that serves best, or without, and why.

A cache that a user names is used if it fits: as it is, else with what it keeps in host memory, else not at all. Where
step caches are allowed, those that were calibrated to keep the asked quality compete with none, by predicted time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tightfit.errors import BudgetTooSmall
from tightfit.run.calibration import PlanningInputs
from tightfit.run.limits import QUALITY, Limits
from tightfit.schema.cache_calibration import CacheCalibration, CacheTrial
from tightfit.schema.plan import Plan, Reason
from tightfit.schema.step_cache import StepCache
from tightfit.units import format_seconds

__all__ = ["InputsWith", "PlannedCall", "plan_with_cache"]

InputsWith = Callable[[StepCache | None], PlanningInputs]  # measures the call with a step cache of the denoisers
TRIED = 3  # calibrated caches that are measured for a plan


class PlannedCall(NamedTuple):
    """A plan, and what it was made from."""

    plan: Plan
    planning_inputs: PlanningInputs


def plan_with_cache(limits: Limits, inputs_with: InputsWith) -> PlannedCall:
    """Return the best plan within `limits`, with the step cache that they name or allow. Raises BudgetTooSmall."""
    if limits.cache is not None:
        return _named(limits, limits.cache, inputs_with)
    plain = _planned(limits, None, inputs_with)
    return _calibrated(limits, plain, inputs_with) if limits.may_choose_cache else plain


def _planned(limits: Limits, cache: StepCache | None, inputs_with: InputsWith) -> PlannedCall:
    planning_inputs = inputs_with(cache)
    return PlannedCall(planning_inputs.plan(limits), planning_inputs)


def _with_reason(call: PlannedCall, decision: str, because: str) -> PlannedCall:
    reasons = (*call.plan.reasons, Reason(decision=decision, because=because))
    return call._replace(plan=call.plan.model_copy(update={"reasons": reasons}))


# a cache that is named


def _named(limits: Limits, cache: StepCache, inputs_with: InputsWith) -> PlannedCall:
    """Return the plan with `cache`, or with the next smaller one that fits."""
    refusals = list[BudgetTooSmall]()
    on_host = cache.model_copy(update={"keep_on": "host"})
    for each in (cache, None) if cache.lossless or cache.keep_on == "host" else (cache, on_host, None):
        try:
            found = _planned(limits, each, inputs_with)
        except BudgetTooSmall as refusal:
            refusals.append(refusal)
            continue
        if not refusals:
            return found
        because = f"with what {cache.strategy} keeps on the device, {_first_line(refusals[0])}"
        if each is None:
            return _with_reason(found, f"no step cache, as {cache.strategy} does not fit", because)
        return _with_reason(found, f"{cache.strategy} keeps on the host what it reuses", because)
    raise refusals[-1]


def _first_line(error: BudgetTooSmall) -> str:
    return str(error).splitlines()[0]


# caches that are allowed


class _CalibratedCache(NamedTuple):
    """A calibrated cache for a call of so many steps."""

    trial: CacheTrial
    calibration: CacheCalibration
    steps: int

    @property
    def measured(self) -> StepCache:
        """The cache as its footprint is measured: steps that a threshold skips are those of the calibration."""
        if not self.trial.cache.by_values:
            return self.trial.cache
        skipped = self.calibration.skipped_of(self.trial, self.steps)
        return self.trial.cache.model_copy(update={"skipped_steps": skipped})

    @property
    def described(self) -> str:
        least = self.trial.least_psnr
        change = "the same pictures" if least is None else f"at least {least:.1f} dB"
        calls = f"{self.calibration.calls} calls of {self.calibration.steps} steps"
        return f"{change} PSNR to the pictures without, in {calls}"


def _calibrated(limits: Limits, plain: PlannedCall, inputs_with: InputsWith) -> PlannedCall:
    """Return the fastest of `plain` and the plans with calibrated caches that keep the asked quality."""
    quality = QUALITY if limits.quality is None else limits.quality
    steps = plain.planning_inputs.footprint.steps
    options, why_none = _options(limits.calibrations or (), quality, steps)
    best, option = plain, None
    for each in options[:TRIED]:
        try:
            found = _planned(limits, each.measured, inputs_with)
        except BudgetTooSmall as refusal:
            why_none = f"{each.trial.cache.strategy} does not fit: {_first_line(refusal)}"
            continue
        if _seconds(found.plan) < _seconds(best.plan):
            best, option = found, each
        elif best is plain:
            why_none = f"{each.trial.cache.strategy} would not be faster"
    if option is None:
        return _with_reason(plain, "no step cache", why_none)
    plan = _in_place(best.plan, option.measured, option.trial.cache)
    seconds = f"{format_seconds(_seconds(plan))} instead of {format_seconds(_seconds(plain.plan))} predicted"
    because = f"{seconds}; {option.described}, {quality:g} dB asked"
    return _with_reason(best._replace(plan=plan), option.trial.cache.described, because)


def _options(
    calibrations: Sequence[CacheCalibration], quality: float, steps: int | None
) -> tuple[list[_CalibratedCache], str]:
    """Return calibrated caches of that quality, those first that took least time; and why there are none."""
    if not calibrations:
        return [], "none was calibrated for this pipeline: tightfit calibrate does"
    if steps is None:
        return [], "the pipeline takes no number of steps"
    near = [each for each in calibrations if each.is_for(steps)]
    if not near:
        known = ", ".join(str(each.steps) for each in calibrations)
        return [], f"calibrated for {known} steps, and not for {steps}"
    nearest = min(near, key=lambda each: abs(each.steps - steps))
    saving = [each for each in nearest.trials if each.seconds_share < 1]
    good = [each for each in saving if each.within(quality)]
    if not good:
        best = max((each.least_psnr or 0.0 for each in saving), default=0.0)
        return [], f"none that saves time keeps {quality:g} dB, by the calibration: the best has {best:.1f} dB"
    good.sort(key=lambda each: each.seconds_share)
    return [_CalibratedCache(each, nearest, steps) for each in good], "none is faster"


def _in_place(plan: Plan, measured: StepCache, cache: StepCache) -> Plan:
    """Return `plan` with `cache` where it has `measured`."""
    components = {
        name: part.model_copy(update={"cache": cache}) if part.cache == measured else part
        for name, part in plan.components.items()
    }
    return plan.model_copy(update={"components": components})


def _seconds(plan: Plan) -> float:
    return sum(phase.seconds for phase in plan.forecast)
