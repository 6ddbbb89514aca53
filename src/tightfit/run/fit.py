"""The public `fit`: by a budget, which is planned here, or by a level or a plan, as `apply.fitting.fit` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply import fitting
from tightfit.apply.fitting import Fitted, apply_plan
from tightfit.devices.choice import choose_device
from tightfit.devices.seam import Device
from tightfit.errors import PlanError
from tightfit.measure.modules import HANDLE
from tightfit.plan.planner import make_plan
from tightfit.records import Budget, Plan, Request
from tightfit.run.footprints import measure_footprint
from tightfit.run.machines import machine_of

__all__ = ["fit"]


def fit(
    pipe: Any,
    *,
    budget: Budget | str | int | None = None,
    level: int | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    request: Request | Mapping[str, Any] | None = None,
    device: str | torch.device | Device | None = None,
    ram: str | int | None = None,
    allow: Sequence[str] = (),
    count_activations: bool = True,
) -> Fitted:
    """Makes `pipe`, a diffusers pipeline or one module, run within a budget, or as a level or a plan says.

    Exactly one of `budget`, `level` (0 to 3) and `plan` is given. A budget is what the device's allocator may hold,
    as bytes or in words ("8GB" is 8·10⁹, "8GiB" 8·2³⁰), or a Budget; with `ram`, so many bytes of host memory may
    wait for the device. It is planned for `request` (default: the pipeline's own defaults) from a footprint, which is
    measured once, and from this computer's rates, which are measured once too (up to 20 s). Numbers stay the same; only
    where nothing fits that way are the lossy techniques used that `allow` names. A budget is for a pipeline, on a
    device with memory of its own.

    A plan is a Plan, a mapping of its fields, or a YAML or JSON file of them; a mapping may name a `level` and only
    what differs from it. `device` is "cpu", "cuda", "cuda:1" or "loopback" (default: the first card, else the CPU). A
    second `fit` of a pipeline replaces the first.

    On a card its allocator counts bytes for nothing. Elsewhere each operation is watched, which costs tens of
    microseconds apiece: nothing beside large layers, half of the time with tiny ones. `count_activations=False`
    leaves it out; the report then holds weights, moved bytes and times, and says so.

    Returns the handle to its plan, report and `undo()`. Raises PlanError, RequestError or InputError for what is
    illegal, before anything is changed, and BudgetTooSmall where nothing fits; by then, a plan that the pipeline
    followed before is undone, because only an untouched one can be measured.
    """
    if budget is None:
        if level is None and plan is None:
            raise PlanError("fit takes exactly one of budget='8GB', level=0…3 and plan=…")
        if ram is not None or allow:
            raise PlanError(
                f"ram={ram} and allow={tuple(allow)} go with a budget: a level or a plan says all by itself"
            )
        return fitting.fit(
            pipe, level=level, plan=plan, request=request, device=device, count_activations=count_activations
        )
    if level is not None or plan is not None:
        raise PlanError(f"fit takes exactly one of budget={budget}, level={level} and plan={type(plan).__name__}")
    return _fit_within(pipe, _budget(budget, ram), request, choose_device(device), allow, count_activations)


def _budget(size: Budget | str | int, ram: str | int | None) -> Budget:
    if not isinstance(size, Budget):
        return Budget(device=size, ram=ram)
    if ram is not None:
        raise PlanError(f"budget says {size.ram} bytes of RAM, ram={ram}: leave one out")
    return size


def _fit_within(
    pipe: Any,
    budget: Budget,
    request: Request | Mapping[str, Any] | None,
    target: Device,
    allow: Sequence[str],
    count_activations: bool,
) -> Fitted:
    if isinstance(pipe, nn.Module):
        raise PlanError(f"a budget is for a whole pipeline: give a single {type(pipe).__name__} a level or a plan")
    machine = machine_of(target)
    earlier = getattr(pipe, HANDLE, None)
    if earlier is not None:
        earlier.undo()
    plan = make_plan(measure_footprint(pipe, request), machine, budget, allow)
    return apply_plan(pipe, plan, target, count_activations=count_activations)
