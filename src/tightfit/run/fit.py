"""The public `fit`: for a budget, which is planned here, or for a level or a plan, as `apply.fitting.fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply import fitting
from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.fitting import Fitted, apply_plan
from tightfit.apply.other_offloading import refuse_offloaded
from tightfit.apply.replaced_offloading import offloading_device, replaced
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.measure.modules import HANDLE, find_components
from tightfit.run.call_arguments import request_of_example
from tightfit.run.context_parallel import measured_ranks, parallelism_of, refuse_beside_ranks
from tightfit.run.device_maps import DeviceMapLike, MaxMemory, refuse_beside_map, target_of_map
from tightfit.run.limits import BudgetLike, limits_for
from tightfit.run.plan_options import request_to_plan
from tightfit.run.plan_target import PlanTarget, plan_target_of
from tightfit.run.planning_context import bytes_on
from tightfit.run.rank_replanning import RankReplanner
from tightfit.run.replanning import Replanner
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.step_cache import CacheLike

__all__ = ["fit"]


def fit(
    pipe: Any,
    *,
    budget: BudgetLike = None,
    level: int | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    request: Request | Mapping[str, Any] | None = None,
    example: Mapping[str, Any] | None = None,
    device: str | torch.device | Device | None = None,
    ram: str | int | None = None,
    allow: Sequence[str] = (),
    cache: CacheLike = None,
    quality: float | None = None,
    device_map: DeviceMapLike = None,
    max_memory: MaxMemory = None,
    count_activations: bool = True,
    parallel: str | Mapping[str, Any] | None = None,
) -> Fitted:
    """Make `pipe`, a diffusers pipeline or a single module, run within a budget, or under a level or a plan.

    Give at most one of `budget`, `level` (0 to 3) and `plan`. A budget limits the bytes of the device's allocator: a
    number, a text ("8GB" is 8·10⁹, "8GiB" 8·2³⁰), or a Budget. `ram` limits the bytes offloaded to host memory. On a
    CPU both limit the process's resident set, of which Python and its libraries take some hundred megabytes; on a card
    other tensors of this process count too. If none of the three is given, the plan is for 95 % of the device's free
    memory, and at least 512 MiB of a card are left free. Several cards have a budget each:
    `budget={"cuda:0": "10GB", "cuda:1": "8GB"}`; each component runs on one of them, and the pipeline on the denoiser's
    (`device`, or the best one).

    `device_map` and `max_memory` are as for diffusers and accelerate, instead of `budget`, `ram` and `device`.
    `max_memory` has bytes by device: `{0: "10GB", 1: "8GB", "cpu": "30GB"}`, where 0 is cuda:0. Cards that it does not
    name, or gives 0 bytes, are not used, and those that do not exist are ignored; "cpu" limits the weights in host
    memory, beyond which they are on disk (not named: no limit; alone: the pipeline runs on the CPU). Without it, free
    memory is planned for, on all cards. `device_map` is "auto" (the fastest plan; the default), "balanced" (of the
    plans that take at most 2 % longer, that whose fullest card is least full at its predicted peak), one device
    ("cuda", 1, "cpu"), or a mapping of components to a card, on which they compute, or to "cpu" or "disk", in which
    their weights are while they do not run; a component that is left out is planned for ("" stands for all of them).
    While the pipeline follows such a plan, `pipe.hf_device_map` says where the weights of each component are, and
    `pipe.reset_device_map()` undoes the plan and moves all of them to the CPU.

    A budget is planned for at the first call, from its arguments (also images, masks, embeddings and numbers), or at
    once: for an `example`, the arguments of a call by name (`example=dict(prompt="a fox", image=picture)`), or for a
    `request` (`{"height": 512, "width": 512, "arguments": {"clip_skip": 1}}`). The plan is made from a footprint
    (measured once, in seconds) and the card's rates (measured once, in up to 20 s). It is lossless if such a plan
    fits; otherwise it may use the lossy techniques in `allow`. A budget needs a whole pipeline.

    `cache` is a step cache for the denoisers, planned for within the budget: the name of a strategy ("first-block"),
    with its fields as text ("first-block,threshold=0.1"), as a mapping or as a StepCache. All but "text-kv" change
    the pictures. What does not fit on the device is kept in host memory, and if that does not fit either, there is no
    step cache, and the plan says why. With `allow=["step-cache"]` the planner chooses the fastest of those that were
    calibrated on this pipeline (`tightfit.calibrate`) and kept a PSNR of `quality` dB (default: 30) to the pictures
    without.

    To train within a budget, or to guide by gradients, say so in the request: `{"backward": "parameters"}` leaves room
    for a backward pass of those parameters that require gradients after each denoiser call, `{"backward": "inputs"}`
    for one of the latents. What an optimizer keeps is not planned for.

    A call is measured on a copy of the pipeline without weights: your own hooks are called there too, with the copy;
    callbacks are not. A call that cannot be measured beforehand (code that depends on tensor values, weights in a
    custom format) runs at level 3, capped at the budget and without a prediction; the plan and the report say why.
    The next call of the same kind is planned from what this one did.

    A call with another request (a larger image, a larger batch, more frames, another `max_sequence_length`) is planned
    for before it begins, and the report says so; if that raises BudgetTooSmall, nothing is changed.

    `plan` is a Plan, a mapping of its fields, or a YAML or JSON file of them; a mapping may have a `level` and only the
    fields that differ from it. `device` is "cpu", "cuda", "cuda:1" or "loopback" (default: torch's current card, else
    the CPU). A second `fit` of a pipeline replaces the first. Offloading by diffusers or accelerate that is on is
    replaced until `undo()`; its card is then the default.

    `parallel={"context": 2}` runs denoisers and autoencoders on both ranks of a process group together: each computes
    a share of the rows of every operation, and all get the same result. Every rank fits its own copy of the pipeline,
    with a level, a plan or a budget for its own device, and makes the same calls, with the same seeds. "attention" is
    how attention reaches the keys of other ranks: "gathered", "ring", "heads", or "auto" (the default), with which a
    budget's plan takes the fastest that fits on all ranks. With `"cfg": 2` there are two groups of that many ranks, of
    which each computes one of the two guidance predictions of a step; with `"cfg": "auto"` a budget's plan has them
    where they are faster. `parallel="auto"` takes all ranks, and leaves both to the plan.

    On a card the allocator counts bytes at no cost. On other devices each operation is observed, which takes tens of
    microseconds: nothing beside large layers, half of the time with tiny ones. `count_activations=False` turns this
    off; the report then has only weights, transferred bytes and times, and says so.

    Returns the handle with the plan, the report and `undo()`. Raises PlanError, RequestError or InputError for invalid
    arguments, before anything is changed, and BudgetTooSmall if no plan fits; by then, an earlier plan of the pipeline
    is undone, because only an unmodified pipeline can be measured.
    """
    if device_map is not None or max_memory is not None:
        refuse_beside_ranks(parallel, "device_map or max_memory")
        refuse_beside_map(
            device_map,
            max_memory,
            budget=budget,
            ram=ram,
            cache=cache,
            quality=quality,
            level=level,
            plan=plan,
            device=device,
        )
        plan_target = target_of_map(
            device_map, max_memory, allow, list(find_components(pipe)), lambda device: bytes_on(device, pipe)
        )
        return _fit_within(pipe, plan_target, request_to_plan(request, example), example, count_activations)
    limits = limits_for(budget, ram, allow, level, plan, cache, quality)
    if limits is not None:
        refuse_beside_ranks(parallel, limits)
    if device is None and plan is None and (limits is None or limits.budget is None or not limits.budget.devices):
        device = offloading_device(pipe)
    if limits is not None:
        planned = request_to_plan(request, example)
        ranks = _compared(parallelism_of(pipe, parallel, request), pipe)
        return _fit_within(pipe, plan_target_of(limits, device), planned, example, count_activations, ranks)
    ranks = _compared(parallelism_of(pipe, parallel, request), pipe)
    fitted = fitting.fit(
        pipe, level=level, plan=plan, request=request, device=device, count_activations=count_activations,
        parallel=ranks,
    )  # fmt: skip
    if ranks is not None:
        ranks.share_weights(fitted.session)
    return fitted


def _compared(ranks: ContextParallel | None, pipe: Any) -> ContextParallel | None:
    """Return `ranks`, which have compared their weights."""
    if ranks is not None:
        ranks.compare_weights(find_components(pipe))
    return ranks


def _fit_within(
    pipe: Any,
    plan_target: PlanTarget,
    request: Request | None,
    example: Mapping[str, Any] | None,
    count_activations: bool,
    ranks: ContextParallel | None = None,
) -> Fitted:
    if isinstance(pipe, nn.Module):
        raise PlanError(f"a budget is for a whole pipeline: give a single {type(pipe).__name__} a level or a plan")
    refuse_offloaded(pipe, measured=True)
    call_request = request if example is None else request_of_example(pipe, example)
    earlier = getattr(pipe, HANDLE, None)
    if earlier is not None:
        earlier.undo()
    ranks = ranks and measured_ranks(ranks, plan_target.devices[0])
    with replaced(pipe), nullcontext() if ranks is None else ranks.group.call():
        replanner = RankReplanner(pipe, plan_target, ranks) if ranks else Replanner(pipe, plan_target)
        plan = replanner.first_plan(pipe) if call_request is None else replanner.plan(pipe, call_request, example)
        target = plan_target.host_of(plan)
        fitted = apply_plan(pipe, plan, target, count_activations=count_activations, replans=replanner, parallel=ranks)
        fitted.tell(replanner.calibration_recorder)
        if ranks is not None:
            ranks.share_weights(fitted.session)
        return fitted
