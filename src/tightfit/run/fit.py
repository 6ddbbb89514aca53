"""The public `fit`: by a budget, which is planned here, or by a level or a plan, as `apply.fitting.fit` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply import fitting
from tightfit.apply.fitting import Fitted, apply_plan
from tightfit.apply.other_offloading import refuse_offloaded
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.measure.modules import HANDLE
from tightfit.run.call_arguments import asked_by
from tightfit.run.plan_options import Wish, asked_for, limits_for
from tightfit.run.plan_target import PlanTarget, plan_target_of
from tightfit.run.replanning import Replanner
from tightfit.run.unmeasured import plan_until_called
from tightfit.schema.footprint import Request
from tightfit.schema.plan import Plan

__all__ = ["fit"]


def fit(
    pipe: Any,
    *,
    budget: Wish = None,
    level: int | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    request: Request | Mapping[str, Any] | None = None,
    example: Mapping[str, Any] | None = None,
    device: str | torch.device | Device | None = None,
    ram: str | int | None = None,
    allow: Sequence[str] = (),
    count_activations: bool = True,
) -> Fitted:
    """Makes `pipe`, a diffusers pipeline or one module, run within a budget, or as a level or a plan says.

    At most one of `budget`, `level` (0 to 3) and `plan` is given. A budget is what the device's allocator may hold,
    as bytes or in words ("8GB" is 8·10⁹, "8GiB" 8·2³⁰), or a Budget; with `ram`, so many bytes of host memory may
    wait for the device. On a CPU both are the process's resident set, of which Python and its libraries take some
    hundred megabytes; on a card other tensors of this process count too. Given nothing, the plan is for 95 % of what is
    free on the device, and at least 512 MiB of a card are left free. Of several cards each has its own:
    `budget={"cuda:0": "10GB", "cuda:1": "8GB"}`; each component computes on one of them, and the pipeline where its
    denoiser does (`device`, or where that is best).

    A budget is planned for at the first call, from its own arguments (pictures, masks, embeddings and numbers too), or
    at once: for an `example`, the arguments of a call by name (`example=dict(prompt="a fox", image=picture)`), or for a
    `request` (`{"height": 512, "width": 512, "arguments": {"clip_skip": 1}}`). The plan is made from a footprint and
    a card's rates, which are measured once each (seconds, and up to 20 s). Numbers stay the same; only where nothing
    fits that way are the lossy techniques used that `allow` names. A budget is for a whole pipeline.

    A call is measured on a copy of the pipeline without weights: hooks of your own are called there too, with the copy;
    callbacks are not. One that cannot be measured beforehand (code that looks at numbers, weights in a format of their
    own) runs at level 3, within the budget as a cap and with nothing predicted; the plan and the report say why. What
    it did is what the next such call is planned by.

    A call that asks for something else (a larger picture, more of them, more frames, another
    `max_sequence_length`) is planned for before it begins, and the report says so; BudgetTooSmall there leaves all as
    it was.

    A plan is a Plan, a mapping of its fields, or a YAML or JSON file of them; a mapping may name a `level` and only
    what differs from it. `device` is "cpu", "cuda", "cuda:1" or "loopback" (default: torch's current card, else the
    CPU). A second `fit` of a pipeline replaces the first.

    On a card its allocator counts bytes for nothing. Elsewhere each operation is watched, which costs tens of
    microseconds apiece: nothing beside large layers, half of the time with tiny ones. `count_activations=False`
    leaves it out; the report then holds weights, moved bytes and times, and says so.

    Returns the handle to its plan, report and `undo()`. Raises PlanError, RequestError or InputError for what is
    illegal, before anything is changed, and BudgetTooSmall where nothing fits; by then, a plan that the pipeline
    followed before is undone, because only an untouched one can be measured.
    """
    limits = limits_for(budget, ram, allow, level, plan)
    if limits is not None:
        asked = asked_for(request, example)
        return _fit_within(pipe, plan_target_of(limits, device), asked, example, count_activations)
    return fitting.fit(
        pipe, level=level, plan=plan, request=request, device=device, count_activations=count_activations
    )


def _fit_within(
    pipe: Any,
    plan_target: PlanTarget,
    request: Request | None,
    example: Mapping[str, Any] | None,
    count_activations: bool,
) -> Fitted:
    if isinstance(pipe, nn.Module):
        raise PlanError(f"a budget is for a whole pipeline: give a single {type(pipe).__name__} a level or a plan")
    refuse_offloaded(pipe)
    asked = request if example is None else asked_by(pipe, example)
    earlier = getattr(pipe, HANDLE, None)
    if earlier is not None:
        earlier.undo()
    replanner = Replanner(pipe, plan_target)
    plan = plan_until_called(pipe, plan_target) if asked is None else replanner.plan(pipe, asked, example)
    target = plan_target.host_of(plan)
    fitted = apply_plan(pipe, plan, target, count_activations=count_activations, replans=replanner)
    fitted.tell(replanner.calibration_recorder)
    return fitted
