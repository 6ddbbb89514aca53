"""What a user asked of context parallelism → the ranks that share rows, in the process group that is running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist

from tightfit.apply.context_parallel.doubled_inputs import DoubledInputs
from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.weight_sharing import WeightSharing
from tightfit.devices.device import Device
from tightfit.errors import PlanError, unknown_name
from tightfit.measure.modules import HANDLE, find_components, find_role
from tightfit.run.doubled_calls import doubled_inputs_of
from tightfit.run.limits import Limits
from tightfit.schema.plan import ContextAttention
from tightfit.schema.rank_option import GROUPS, RankOption, rank_options
from tightfit.schema.request import Request

__all__ = ["doubled_of", "measured_ranks", "parallelism_of", "refuse_beside_ranks"]

KINDS = ("context", "cfg", "attention")  # of parallelism


def measured_ranks(ranks: ContextParallel, device: Device) -> ContextParallel:
    """Return the same `ranks`, with what it takes them to send tensors on `device`. Collective."""
    with ranks.group.call():
        return replace(ranks, exchange_rates=ranks.group.exchange_rates(device.torch_device, device.synchronize))


def parallelism_of(
    pipe: Any, parallel: str | Mapping[str, Any] | None, request: Request | Mapping[str, Any] | None
) -> ContextParallel | None:
    """Return how `pipe` may run on all ranks of the default process group; None if `parallel` is None, or for one rank.

    `parallel` is "auto" or a mapping: "context", the number of ranks that share rows; "cfg", 2 for two groups of that
    many ranks, of which each computes one guidance prediction, or "auto" for as many as are faster; and "attention",
    how that reaches the keys of other ranks: "gathered", "ring", "heads" or "auto". Where there is a choice, a plan
    makes it; until then the first option is taken. Collective: every rank calls it. Raises PlanError.
    """
    if parallel is None:
        return None
    if isinstance(pipe, torch.nn.Module):
        raise PlanError(f"parallel={parallel!r} is for a whole pipeline, not for a single {type(pipe).__name__}")
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError(
            f"parallel={parallel!r} needs a process group: start with torchrun --nproc-per-node 2 and call "
            "torch.distributed.init_process_group() first"
        )
    if torch.device("cpu") not in dist.distributed_c10d._get_default_group()._device_types:
        raise PlanError(
            f"parallel={parallel!r} needs a process group that also sends tensors of the CPU: "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), not '
            f"{dist.get_backend()!r}", backend=dist.get_backend(),
        )  # fmt: skip
    group = RankGroup()
    options = _options(parallel, group.size)
    if group.size == 1:
        return None
    if (earlier := getattr(pipe, HANDLE, None)) is not None:  # only an unmodified pipeline can be measured
        earlier.undo()
    asked = Request.from_mapping(request) if isinstance(request, Mapping) else request or Request()
    counts = {option.cfg_groups for option in options}
    two = GuidanceRanks.among(group, group.size // GROUPS) if GROUPS in counts else None
    doubled = doubled_of(pipe, asked) if min(counts) < group.size else {}
    first, weights = options[0], WeightSharing.among(group)
    return ContextParallel(
        group, RowShares.equal(group.size), first.context_attention, doubled, options=options, weights=weights,
        guidance=two if first.cfg_groups == GROUPS else None, two_groups=two if len(counts) > 1 else None,
    )  # fmt: skip


def refuse_beside_ranks(parallel: str | Mapping[str, Any] | None, beside: str | Limits) -> None:
    """Raise PlanError if ranks, of which each has one device, are to have several devices `beside`, or a step cache."""
    if isinstance(beside, Limits):
        if parallel is not None and beside.cache is not None:
            raise PlanError(f"parallel={parallel!r}: networks of ranks take no cache={beside.cache.strategy}")
        if parallel is not None and beside.may_choose_cache:
            raise PlanError(f"parallel={parallel!r}: networks of ranks take no step cache: leave allow=step-cache out")
        several = beside.budget is not None and bool(beside.budget.devices)
        beside = f"budget={beside.budget.described}" if beside.budget is not None and several else ""
    if parallel is not None and beside:
        raise PlanError(
            f"parallel={parallel!r} goes with a budget for each rank's one device, a level or a plan, not with {beside}"
        )


def _options(parallel: str | Mapping[str, Any], size: int) -> tuple[RankOption, ...]:
    """Return the ways in which `size` ranks may compute together, the default first.

    Raises PlanError where `parallel` is invalid, or for another number of ranks.
    """
    if isinstance(parallel, str):
        if parallel != "auto":
            raise PlanError(f'parallel is "auto" or a mapping such as {{"context": {size}}}, not {parallel!r}')
        parallel = {"cfg": "auto"}
    for name in parallel:
        if name not in KINDS:
            raise PlanError(unknown_name("kind of parallelism", name, KINDS), name=name)
    groups = parallel.get("cfg", 1)
    if groups != "auto" and (type(groups) is not int or groups not in (1, GROUPS)):
        raise PlanError(
            f'parallel={dict(parallel)}: "cfg" is 1, {GROUPS} for a group of ranks for each guidance prediction, or '
            f'"auto", not {groups!r}', cfg=groups,
        )  # fmt: skip
    context = parallel.get("context")
    if "context" in parallel and type(context) is not int:
        raise PlanError(f'parallel={dict(parallel)}: "context" is a number of ranks, not {context!r}', context=context)
    options = rank_options(size, None if groups == "auto" else groups, context, _ways(parallel))
    if not options:
        fewest = 1 if groups == "auto" else groups
        each = max(size // fewest, 1) if context is None else context
        asked = f"{each * fewest} ranks" + f", {fewest} groups of {each}," * (fewest > 1)
        raise PlanError(
            f"parallel={dict(parallel)} is for {asked} and the process group has {size}",
            asked=each * fewest, size=size,
        )  # fmt: skip
    return options


def _ways(parallel: Mapping[str, Any]) -> tuple[ContextAttention, ...]:
    attention = parallel.get("attention", "auto")
    if attention == "auto":
        return get_args(ContextAttention)
    if attention not in get_args(ContextAttention):
        raise PlanError(unknown_name("attention of ranks", str(attention), ("auto", *get_args(ContextAttention))))
    return (attention,)


def doubled_of(pipe: Any, request: Request) -> dict[str, DoubledInputs | str]:
    """Return `doubled_inputs_of`, or why these are not known, for each denoiser."""
    try:
        return doubled_inputs_of(pipe, request)
    except Exception as error:  # raised by the pipeline's code
        denoisers = (name for name, part in find_components(pipe).items() if find_role(name, part) == "denoiser")
        return dict.fromkeys(denoisers, f"a call for twice the height could not be simulated: {error}")
