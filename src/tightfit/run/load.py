"""A model folder → its pipeline under a plan; weights that the plan leaves in their files are not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tightfit.apply.choices import choices_of, decide
from tightfit.apply.fitting import Fitted
from tightfit.apply.weights.quantize import left_in_files
from tightfit.checkpoint.folder import ModelFolder, check_folder, network_folder
from tightfit.checkpoint.headers import names_in
from tightfit.checkpoint.lazy_loading import LeftInFiles, build_lazily, networks_in
from tightfit.devices.device import Device
from tightfit.errors import InputError, PlanError, unknown_name
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import request_of_example
from tightfit.run.context_parallel import measured_ranks, parallelism_of, refuse_beside_ranks
from tightfit.run.device_maps import DeviceMapLike, MaxMemory, refuse_beside_map, target_of_map
from tightfit.run.limits import BudgetLike, limits_for
from tightfit.run.models import DTYPES, at_home, find_model, stored_dtype
from tightfit.run.plan_options import request_to_plan
from tightfit.run.plan_target import PlanTarget, plan_target_of
from tightfit.run.planning_context import PlannedFolder, plan_within
from tightfit.run.rank_replanning import RankReplanner
from tightfit.run.replanning import Replanner
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.step_cache import CacheLike

__all__ = ["Loaded", "load", "load_made", "load_on_rank"]


class Loaded(NamedTuple):
    """A pipeline (or a single network) and the handle to its plan."""

    pipe: Any
    fitted: Fitted


def load(
    model: str | Path,
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
    dtype: str | None = None,
    count_activations: bool = True,
    parallel: str | Mapping[str, Any] | None = None,
) -> Loaded:
    """Load `model`, a diffusers folder, a hub id, or the folder of one diffusers network, to run under a plan.

    Give at most one of `budget` (with `ram`, `allow`, `cache` and `quality`, see `fit`), `level`, `plan`, and
    `device_map` with `max_memory` (see `fit`); with none of them, the plan is for the free memory, as in `fit`. A
    budget's plan is made
    from the folder's configurations before anything is loaded: for `request`, for an `example` call, or else for the
    pipeline's defaults. A call with another request is planned for as in `fit`, without reading weights that are left
    in files.

    `parallel`: the ranks of a process group that share the pipeline's rows, as in `fit`; each loads the model itself.

    Like `fit(DiffusionPipeline.from_pretrained(model), …)`, except that weights which the plan leaves on disk are not
    loaded: of a component with `offload_to="disk"`, large layers are read from its safetensors files at each use.
    `dtype` is "bfloat16", "float16" or "float32" (default: as stored; on the CPU float32, unless a single network is
    loaded). Weights stored in another dtype are converted; those left on disk, into a temporary file.

    Raises ModelError, naming file and tensor, if the files do not match the model, before anything is computed;
    PlanError, RequestError, InputError and BudgetTooSmall as `fit`.
    """
    if device_map is not None or max_memory is not None:
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
        refuse_beside_ranks(parallel, "device_map or max_memory")
        path, folder = _find(model)
        plan_target: PlanTarget | None = target_of_map(device_map, max_memory, allow, _network_names(folder))
    else:
        limits = limits_for(budget, ram, allow, level, plan, cache, quality)
        plan_target = plan_target_of(limits, device) if limits is not None else None
        path, folder = _find(model)
    choices, target = ({}, plan_target.devices[0]) if plan_target is not None else choices_of(level, plan, device)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(unknown_name("dtype", dtype, DTYPES), dtype=dtype)
    dtype = dtype or _usual(path, folder, target)
    if plan_target is not None:
        if folder is None:
            raise PlanError(f"a budget is for a whole pipeline: give the network in {path} a level or a plan")
        if parallel is not None:
            refuse_beside_ranks(parallel, plan_target.limits)
            asked = request_to_plan(request, example)
            return load_on_rank(
                folder, dtype, plan_target, asked, parallel, example=example, count_activations=count_activations
            )
        made = plan_within(path, request_to_plan(request, example), plan_target, dtype, example)
        return load_made(folder, dtype, plan_target, made, count_activations=count_activations)
    return _load_under(
        path, folder, dtype, choices, target, request=request, parallel=parallel, by_level=plan is None,
        count_activations=count_activations,
    )  # fmt: skip


def _load_under(
    path: Path, folder: ModelFolder | None, dtype: str, choices: dict[str, Any], target: Device, *,
    request: Request | Mapping[str, Any] | None, parallel: str | Mapping[str, Any] | None, by_level: bool,
    count_activations: bool,
) -> Loaded:  # fmt: skip
    """Load a pipeline or a network under a level or a plan, whose fields are `choices`."""
    left = _nothing_left if by_level and parallel is None else None  # a level leaves nothing in files
    with build_lazily(path, folder, getattr(torch, dtype), left) as checkpoint:
        ranks = parallelism_of(checkpoint.pipe, parallel, request)
        ranks = ranks and ranks.as_asked(choices)
        decided = decide(checkpoint.pipe, choices | (ranks.choices if ranks else {}), request, target)
        file_weights = checkpoint.fill(_left_by(decided, target))
    if ranks is not None:
        ranks.compare_weights(find_components(checkpoint.pipe))
    fitted = Fitted(
        checkpoint.pipe, decided, target, count_activations=count_activations, file_weights=file_weights,
        parallel=ranks,
    )  # fmt: skip
    if ranks is not None:
        ranks.share_weights(fitted.session)
    return Loaded(checkpoint.pipe, fitted)


def load_made(
    folder: ModelFolder, dtype: str, plan_target: PlanTarget, made: PlannedFolder, *, count_activations: bool = True
) -> Loaded:
    """Load the pipeline in `folder` under the plan `made` for `plan_target`; other requests are planned for it too.

    Raises as `load`.
    """
    target = plan_target.host_of(made.plan)
    left = _left_by(made.plan, target)
    with build_lazily(folder.path, folder, getattr(torch, dtype), left) as checkpoint:
        file_weights = checkpoint.fill(left)
    replans = Replanner(checkpoint.pipe, plan_target._replace(limits=made.limits), made)
    fitted = Fitted(
        checkpoint.pipe,
        made.plan,
        target,
        count_activations=count_activations,
        file_weights=file_weights,
        replans=replans,
    )
    fitted.tell(replans.calibration_recorder)
    return Loaded(checkpoint.pipe, fitted)


def load_on_rank(
    folder: ModelFolder, dtype: str, plan_target: PlanTarget, request: Request | None,
    parallel: str | Mapping[str, Any], *, example: Mapping[str, Any] | None = None, count_activations: bool = True,
) -> Loaded:  # fmt: skip
    """Load the pipeline in `folder` on one rank of several, under the plan that all decide for `request` or `example`.

    Raises as `load`.
    """
    refuse_beside_ranks(parallel, plan_target.limits)
    with build_lazily(folder.path, folder, getattr(torch, dtype)) as checkpoint:
        pipe, target = checkpoint.pipe, plan_target.devices[0]
        call_request = request or Request() if example is None else request_of_example(pipe, example)
        ranks = parallelism_of(pipe, parallel, call_request)
        if ranks is None:  # the only one
            made = plan_within(folder.path, request, plan_target, dtype, example)
            return load_made(folder, dtype, plan_target, made, count_activations=count_activations)
        ranks = measured_ranks(ranks, target)
        with ranks.group.call():
            replans = RankReplanner(pipe, plan_target, ranks)
            plan = replans.plan(pipe, call_request, example)
            file_weights = checkpoint.fill(_left_by(plan, target))
            ranks.compare_weights(find_components(pipe))
            fitted = Fitted(
                pipe, plan, target, count_activations=count_activations, file_weights=file_weights, replans=replans,
                parallel=ranks,
            )  # fmt: skip
            ranks.share_weights(fitted.session)
    fitted.tell(replans.calibration_recorder)
    return Loaded(pipe, fitted)


def _left_by(plan: Plan, target: Device) -> LeftInFiles:
    """Return what says which weights `plan` leaves in their files."""
    return lambda name, network: left_in_files(network, plan.components[name], separate=target.separate)


def _nothing_left(name: str, network: nn.Module) -> set[int]:
    return set()


def _find(model: str | Path) -> tuple[Path, ModelFolder | None]:
    path = at_home(Path(model))
    if path.is_dir() and "config.json" in (names := names_in(path)) and "model_index.json" not in names:
        return path, None
    folder = check_folder(path) if isinstance(model, Path) else find_model(model)
    return folder.path, folder


def _network_names(folder: ModelFolder | None) -> list[str]:
    return [part.name for part in networks_in(folder)] if folder is not None else ["model"]


def _usual(path: Path, folder: ModelFolder | None, target: Device) -> str:
    if folder is None:
        return stored_dtype((network_folder(path),))
    return "float32" if target.torch_device.type == "cpu" else stored_dtype(folder.components)
