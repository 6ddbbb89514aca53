"""Budgets and what a plan within them may use, as options say it → Limits. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tightfit.errors import PlanError
from tightfit.schema.cache_calibration import CacheCalibration
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.machine import Budget
from tightfit.schema.plan import check_techniques
from tightfit.schema.step_cache import CacheLike, StepCache

__all__ = ["QUALITY", "BudgetLike", "Limits", "limits_for", "limits_of"]

BudgetLike = Budget | Mapping[str, str | int] | str | int | None  # a budget: bytes, or a mapping for several devices
QUALITY = 30.0  # dB that step caches keep, unless something else is asked for


class Limits(NamedTuple):
    """What a plan may use."""

    budget: Budget | None  # None: the free memory
    allow: tuple[str, ...] = ()  # lossy techniques, used only if nothing else fits
    host: str | None = None  # of several devices, the one that runs denoisers; None: the best
    device_map: DeviceMap | None = None  # what a user fixed; None: nothing
    cache: StepCache | None = None  # of denoisers, as users name it; None: nothing is named
    quality: float | None = None  # dB that a step cache keeps which the planner chooses; None: QUALITY
    calibrations: tuple[CacheCalibration, ...] | None = None  # of step caches on this pipeline; None: not looked up yet

    @property
    def may_choose_cache(self) -> bool:
        """Whether the planner may choose a step cache."""
        return "step-cache" in self.allow and self.cache is None


def limits_for(
    budget: BudgetLike, ram: str | int | None, allow: Sequence[str], level: int | None, plan: object,
    cache: CacheLike = None, quality: float | None = None,
) -> Limits | None:  # fmt: skip
    """Return the limits of `fit` and `load`; None if a `level` or a `plan` is given. PlanError for both."""
    if level is None and plan is None:
        return _limits(_budget(budget, ram), allow, cache, quality)
    if budget is not None:
        raise PlanError(f"give at most one of budget={budget}, level={level} and plan={type(plan).__name__}")
    if ram is not None or allow:
        raise PlanError(f"ram={ram} and allow={tuple(allow)} go with a budget: a level or a plan says all by itself")
    if cache is not None:
        raise PlanError(f"cache={cache} goes with a budget: elsewhere the plan's components.NAME.cache says it")
    if quality is not None:
        raise PlanError(f"quality={quality} goes with a budget and allow=step-cache")
    return None


def _limits(budget: Budget | None, allow: Sequence[str], cache: CacheLike, quality: float | None) -> Limits:
    techniques = check_techniques(allow)
    if cache is not None and budget is not None and budget.devices:
        raise PlanError(f"cache={cache} is for one device, not for a budget of {len(budget.devices)}")
    if quality is not None and "step-cache" not in techniques:
        raise PlanError(f"quality={quality} is for step caches that the planner chooses: allow=step-cache lets it")
    if quality is not None and not 0 <= quality < math.inf:
        raise PlanError(f"quality={quality} is a PSNR in dB: 0 or more, e.g. {QUALITY:g}")
    limits = Limits(budget, techniques, cache=None if cache is None else StepCache.of(cache), quality=quality)
    if limits.may_choose_cache and budget is not None and budget.devices:
        raise PlanError(f"allow=step-cache is for one device, not for a budget of {len(budget.devices)}")
    return limits


def _budget(size: BudgetLike, ram: str | int | None) -> Budget | None:
    if isinstance(size, Mapping):
        return Budget(devices=dict(size), ram=ram)
    if not isinstance(size, Budget):
        return None if size is None and ram is None else Budget(device=size, ram=ram)
    if ram is not None:
        raise PlanError(f"budget says {size.ram} bytes of RAM, ram={ram}: leave one out")
    return size


def _named_sizes(text: str) -> Budget | Mapping[str, str] | str:
    """Parse --budget: one size, or several as DEVICE=SIZE with commas between."""
    if "=" not in text:
        return text
    pairs = [pair.partition("=") for pair in text.split(",")]
    sizes = {name.strip(): size.strip() for name, _, size in pairs}
    if len(sizes) < len(pairs) or not all(name and size for name, size in sizes.items()):
        raise PlanError(f"--budget {text!r} is not DEVICE=SIZE,DEVICE=SIZE, e.g. cuda:0=10GB,cuda:1=8GB")
    return sizes


def limits_of(
    budget: str | None, ram: str | None, allow: list[str], choices: Mapping[str, Any], cache: str | None = None,
    quality: float | None = None,
) -> Limits | None:  # fmt: skip
    """Return the limits of --budget, --ram, --allow, --cache and --quality; None without any.

    PlanError for `choices` beside them.
    """
    if budget is None and ram is None:
        if allow and choices:
            raise PlanError(f"--allow {allow[0]} goes with a budget: elsewhere --set components.NAME.storage says it")
        if cache and choices:
            raise PlanError(f"--cache {cache} goes with a budget: elsewhere --set components.NAME.cache={cache} does")
        return _limits(None, allow, cache, quality) if allow or cache or quality is not None else None
    if choices:
        said = ", ".join(choices)
        raise PlanError(f"--budget makes the plan: leave out what else decides about it ({said}), or leave it out")
    return _limits(_budget(None if budget is None else _named_sizes(budget), ram), allow, cache, quality)
