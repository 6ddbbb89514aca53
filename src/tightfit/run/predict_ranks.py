"""A model on several cards that share its rows → the Prediction of one of them; no card is there, and nothing is sent.

Shares are equal, so the first rank has the most rows, and the second has neighbours on both sides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from tightfit.apply.context_parallel.doubled_inputs import DoubledInputs
from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.catalog.known import card_called, known_card
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.loading import quietly
from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.plan.default_rates import computer_with
from tightfit.plan.rank_choice import (
    exchange_reason,
    exchanged_bytes,
    exchanges_of,
    option_reasons,
    options_to_try,
    sharing_autoencoders,
)
from tightfit.run.answer_cache import Missing
from tightfit.run.calibration import CalibrationStore, PlanningInputs
from tightfit.run.context_parallel import doubled_of
from tightfit.run.count import counted
from tightfit.run.footprints import Measurer
from tightfit.run.limits import Limits
from tightfit.run.models import resolve_model, stored_dtype
from tightfit.run.plan_options import demo_request
from tightfit.run.rank_layout import RankLayout
from tightfit.run.simulate import pipeline_for
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ContextAttention, Plan
from tightfit.schema.rank_option import AUTOENCODERS_AT_ONCE, AutoencoderSharing, RankOption, rank_options
from tightfit.schema.request import Request
from tightfit.schema.results import Prediction

__all__ = ["SharedCall", "forecast_ranks"]

NOTE = "computed for one of the ranks, whose cards and shares of the rows are taken to be equal"


def forecast_ranks(
    model: str | None, card: str | None, layout: RankLayout, choices: dict[str, Any], request: Request,
    say: Callable[[str], AbstractContextManager[object]], limits: Limits | None = None, *, simulated: bool = False,
) -> Prediction:  # fmt: skip
    """Predict the call `request` of `model` on the cards of `layout`, all like the known `card`.

    Each runs it under `choices` of Plan fields, or under the plan for it within `limits`. Unless `choices` say in how
    many groups, and how attention reaches the keys of other ranks, the fastest that fits is taken; a level has one
    group. Slow steps run inside `say(…)`. Raises as `forecast` does.
    """
    if card is None or "," in card:
        raise PlanError(
            f"{layout.ranks} ranks have cards of one kind, not {card or 'of this computer'}: --card rtx4090"
        )
    if simulated:
        raise PlanError(f"{layout.ranks} ranks are computed, not simulated: leave out --timeline")
    if limits is not None and (limits.cache is not None or limits.may_choose_cache):
        said = "--allow step-cache" if limits.cache is None else f"--cache {limits.cache.strategy}"
        raise PlanError(f"networks of {layout.ranks} ranks take no step cache: leave out {said}")
    if request.backward is not None:
        raise PlanError(f"ranks run calls with gradients whole: leave out --backward {request.backward}")
    options = _options(layout, choices, limits)
    which, _ = resolve_model(model)
    accelerator = known_card(card).model_copy(update={"network_rate": layout.link_rate})
    with say("planning"):
        call = SharedCall.of(which, demo_request(request) if model is None else request, accelerator, layout)

        def tried(way: AutoencoderSharing) -> tuple[SharedCall, dict[RankOption, Prediction | None]]:
            shared = replace(call, autoencoders=way)
            return shared, shared.by_option(options, choices, limits)

        asked = AutoencoderSharing.of(Plan.from_mapping({"level": 0, **choices}).vae)
        (call, found), reasons = sharing_autoencoders(tried, asked)
        seconds = {option: _seconds(its) for option, its in found.items()}
        known = {option: its for option, its in found.items() if its is not None}
        option = min(known, key=lambda option: (seconds[option], known[option].trace.seconds))
        prediction = known[option]
        if layout.ranks > 2:
            prediction = _joined(prediction, call.predicted(1, option, choices, limits))
    reasons += option_reasons(option, seconds, layout.ranks)
    plan = prediction.plan.model_copy(update={"reasons": (*prediction.plan.reasons, *reasons)})
    title = which if isinstance(which, str) else model or "the demo model"
    cards = f"{layout.described} × {card_called(card)}"
    return prediction.model_copy(update={"plan": plan, "model": title, "card": cards})


def _options(layout: RankLayout, choices: Mapping[str, Any], limits: Limits | None) -> tuple[RankOption, ...]:
    """Return the ways in which the ranks of `layout` may compute. PlanError where `choices` are for other ranks."""
    fields = Plan.from_mapping({"level": 0, **choices})
    planned_anew = limits is not None or not choices.keys() - {"context", *RankOption._fields}
    groups = None if planned_anew and "cfg_groups" not in choices else fields.cfg_groups
    context = choices.get("context")
    ways = (fields.context_attention,) if "context_attention" in choices else get_args(ContextAttention)
    if not (options := rank_options(layout.ranks, groups, context, ways)):
        planned = (groups or 1) * (context or max(layout.ranks // (groups or 1), 1))
        raise PlanError(f"the plan is for {planned} ranks, and these are {layout.ranks}", context=planned)
    return options


@dataclass(frozen=True)
class SharedCall:
    """A call of a model whose rows the cards of a layout share."""

    model: str | ModelFolder
    request: Request
    accelerator: Accelerator
    layout: RankLayout
    dtype: str | None
    doubled: Mapping[str, DoubledInputs | str]  # which inputs of a denoiser grow with the height, or why it runs whole
    autoencoders: AutoencoderSharing = AUTOENCODERS_AT_ONCE

    @classmethod
    def of(cls, model: str | ModelFolder, request: Request, accelerator: Accelerator, layout: RankLayout) -> SharedCall:
        dtype = None if isinstance(model, str) else stored_dtype(model.components)
        with quietly():
            pipe, whole = pipeline_for(model, request, getattr(torch, dtype) if dtype else None)
            return cls(model, request, accelerator, layout, dtype, doubled_of(pipe, whole))

    def by_option(
        self, options: Sequence[RankOption], choices: Mapping[str, Any], limits: Limits | None
    ) -> dict[RankOption, Prediction | None]:
        """Return what the first rank does by each of `options` that is tried; None where it does not fit `limits`.

        Raises BudgetTooSmall if it never does.
        """
        found, refusal = dict[RankOption, Prediction | None](), None
        seconds: dict[RankOption, float] = {}
        while tried := options_to_try(options, seconds):
            for option in tried:
                try:
                    found[option] = self.predicted(0, option, choices, limits)
                except BudgetTooSmall as error:
                    refusal, found[option] = error, None
                seconds[option] = _seconds(found[option])
        if refusal is not None and not any(found.values()):
            raise refusal
        return found

    def predicted(self, rank: int, option: RankOption, choices: Mapping[str, Any], limits: Limits | None) -> Prediction:
        """Return what `rank` does by that `option`. Raises BudgetTooSmall."""
        layout, machine = self.layout, computer_with(self.accelerator)
        on_ranks = self.ranks(rank, option).choices
        if limits is None and choices.keys() - on_ranks.keys():
            fields, footprint = {**choices, **on_ranks}, self._footprint(rank, option, lambda _: ())
        else:
            within, past = limits or Limits(None), CalibrationStore(None, self.accelerator)
            inputs = functools.partial(PlanningInputs, machine=machine, past=past)
            footprint = self._footprint(rank, option, lambda bare: inputs(bare).missing(within))
            plan = inputs(footprint).plan(within)
            reasons = (*plan.reasons, exchange_reason(footprint, layout.per_node))
            vae = plan.vae.model_copy(update=self.autoencoders.fields)
            plan = plan.model_copy(update={**on_ranks, "vae": vae, "reasons": reasons})
            fields = plan.model_dump(mode="json", exclude={"device", "request"})
        found = counted(footprint, self.accelerator, fields, title="", card=None, note=NOTE)
        trace = found.trace.model_copy(update={"notes": (*found.trace.notes, *self._whole(footprint, option))})
        return found.model_copy(update={"trace": trace, "sent_bytes": exchanged_bytes(footprint, layout.per_node)})

    def ranks(self, rank: int, option: RankOption) -> ContextParallel:
        """Return the ranks that compute together, as seen by `rank`."""
        count, per_node = self.layout.ranks, self.layout.per_node
        group, context = SimulatedRankGroup(rank, count, per_node), count // option.cfg_groups
        guidance = GuidanceRanks.among(group, context) if option.cfg_groups > 1 else None
        return ContextParallel(
            group, RowShares.equal(count), option.context_attention, self.doubled, guidance=guidance,
            autoencoders=self.autoencoders,
        )  # fmt: skip

    def _footprint(self, rank: int, option: RankOption, missing: Missing) -> Footprint:
        subject = self.model if isinstance(self.model, str) else self.model.path
        expandable = self.accelerator.expandable_refused is None
        measurer = Measurer(subject, self.dtype, expandable=expandable, parallel=self.ranks(rank, option))
        return measurer.measure(self.request, None, missing)

    def _whole(self, footprint: Footprint, option: RankOption) -> Iterator[str]:
        """Yield a sentence on each denoiser that every rank runs whole, though a group has several."""
        if option.cfg_groups == self.layout.ranks:
            return
        sharing = {call.component for phase in footprint.phases for call in phase.calls if exchanges_of(call)}
        for component in footprint.components:
            if component.role == "denoiser" and component.name not in sharing:
                reason = self.doubled.get(component.name, "it is not called")
                because = reason if isinstance(reason, str) else f"it cannot be divided among {self.layout.ranks} ranks"
                yield f"{component.name} runs whole on every rank: {because}"


def _seconds(prediction: Prediction | None) -> float:
    """The predicted seconds; infinite if the call does not fit."""
    return prediction.trace.seconds if prediction is not None and prediction.fits else math.inf


def _joined(one: Prediction, other: Prediction) -> Prediction:
    """Return `one`, each of its phases with the time and memory of that rank which needs more."""
    phases = [
        own.model_copy(update={field: max(getattr(own, field), getattr(its, field)) for field in _SIZES})
        for own, its in zip(one.trace.phases, other.trace.phases, strict=True)
    ]
    seconds = max(one.trace.seconds, other.trace.seconds)
    trace = one.trace.model_copy(update={"phases": tuple(phases), "seconds": seconds})
    host = {name: max(spent, other.host_seconds.get(name, 0.0)) for name, spent in one.host_seconds.items()}
    more = {"needed_bytes": max(one.needed_bytes, other.needed_bytes), "host_seconds": host}
    return one.model_copy(update={"trace": trace, "fits": one.fits and other.fits, **more})


_SIZES = ("seconds", "peak_bytes", "peak_weights", "peak_reserved")
