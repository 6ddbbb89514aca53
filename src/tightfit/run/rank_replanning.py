"""Plans within a budget for one rank of several that share a pipeline's rows: decided by all ranks together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch

from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.errors import BudgetTooSmall
from tightfit.measure.call_log import CallLog
from tightfit.plan.rank_choice import (
    exchange_reason,
    fastest_by_groups,
    option_reasons,
    options_to_try,
    shared_weights_reason,
    shares_reason,
    sharing_autoencoders,
)
from tightfit.run.calibration import PlanningInputs
from tightfit.run.call_arguments import CallShape
from tightfit.run.footprints import Measurer
from tightfit.run.plan_target import PlanTarget
from tightfit.run.replanning import Replanner
from tightfit.schema.machine import Machine
from tightfit.schema.plan import Plan, Reason
from tightfit.schema.rank_option import AutoencoderSharing, RankOption
from tightfit.schema.request import Request

__all__ = ["RankReplanner"]


UNEVEN = 1.1  # times as long as the fastest rank: where the slowest needs more, it is to have fewer rows
SHARE_DIGITS = 3
AGREED_FACTS = ("needed_bytes", "phase", "frames")  # of a refusal: what all ranks do next depends on them


class Measured(NamedTuple):
    """A plan for this rank, and what it was made from; None if that could not be measured."""

    plan: Plan
    inputs: PlanningInputs | None

    @property
    def seconds(self) -> float:
        """The predicted seconds of a call; 0 if nothing is predicted."""
        return sum(phase.seconds for phase in self.plan.forecast)


class Balanced(NamedTuple):
    """What was measured with some shares of the rows, the seconds of the slowest rank, and why shares are unequal."""

    measured: Measured
    slowest: float
    reasons: list[Reason]


class RankReplanner(Replanner):
    """Makes plans for this rank of `parallel`. Each rank has its own device and budget, and so its own weights there.

    In how many groups they compute, and how attention reaches the keys of other ranks, must be the same on all of them:
    of the options of `parallel` the one with which the slowest rank is fastest. Then slower ranks get fewer rows, if
    that is faster. Where no option fits on every rank, each computes its rows of autoencoders in strips, or else all
    rows; where none fits then, all raise BudgetTooSmall.
    """

    retries = False  # the other ranks' calls have ended by then
    keeps_whole = False  # other ranks may have plans that are not kept

    def __init__(self, pipe: Any, plan_target: PlanTarget, parallel: ContextParallel) -> None:
        self._parallel = parallel
        self._any: Measurer | Exception
        super().__init__(pipe, plan_target)

    def _measurer_of(self, pipe: Any, plan_target: PlanTarget) -> Measurer | Exception:
        try:
            self._any = Measurer(pipe, expandable=plan_target.expandable, parallel=self._parallel)
        except Exception as error:  # raised by third-party code, which copying modules runs
            self._any = error
        return self._any

    def first_plan(self, pipe: Any) -> Plan:
        return _on_ranks(super().first_plan(pipe), self._parallel)

    def for_direct_calls(self, now: Plan, because: str) -> Plan | None:
        plan = super().for_direct_calls(now, because)
        return plan and _on_ranks(plan, self._parallel.following(now))

    def for_held(self, pipe: Any, now: Plan, held: int) -> Plan:
        """Return the plan `now`: another one could not be agreed upon with ranks that hold less."""
        return now

    @property
    def _sharing(self) -> int:
        """How many ranks of this computer share weights in host memory, this one included."""
        return 1 if self._parallel.weights is None else len(self._parallel.weights.ranks)

    def _free_machine(self) -> Machine:
        machine, rates = super()._free_machine(), self._parallel.exchange_rates
        (own, *_) = machine.accelerators
        if rates is not None:
            own = own.model_copy(update={"exchange_rate": rates.rate, "exchange_latency": rates.latency})
        if own.is_cpu and own.free is not None and self._limits.budget is None:  # other ranks have the same memory
            own = own.model_copy(update={"free": own.free // self._parallel.group.ranks_here})
        own = own.model_copy(update={"ranks_sharing_weights": self._sharing})
        found: dict[str, Any] = {"accelerators": (own,)}
        if machine.pinnable and self._sharing < self._parallel.group.ranks_here:  # each locks pages of its own
            found["pinnable"] = machine.pinnable // self._parallel.group.ranks_here
        return machine.model_copy(update=found)

    def _new(self, request: Request, shape: CallShape, given: Mapping[str, Any] | None) -> Plan:
        log = self._logs.get(shape)
        plan, reasons = sharing_autoencoders(lambda way: self._chosen(request, shape, given, log, way))
        return plan.model_copy(update={"reasons": (*plan.reasons, *reasons)})

    def _chosen(
        self, request: Request, shape: CallShape, given: Mapping[str, Any] | None, log: CallLog | None,
        autoencoders: AutoencoderSharing,
    ) -> Plan:  # fmt: skip
        """Return the plan by the option that all ranks agree on. Raises BudgetTooSmall on all ranks, or on none."""
        found: dict[RankOption, Measured] = {}
        seconds: dict[RankOption, float] = {}
        refusal = None
        ranks = replace(self._parallel, autoencoders=autoencoders)

        def planned(parallel: ContextParallel) -> Measured:
            self._measurer = self._any.on(parallel) if isinstance(self._any, Measurer) else self._any
            self._inputs_by_shape.pop(shape, None)
            if log is not None:
                self._logs[shape] = log
            plan = super(RankReplanner, self)._new(request, shape, given)
            return Measured(_on_ranks(plan, parallel), self._inputs_by_shape.get(shape))

        while tried := options_to_try(self._parallel.options, seconds):
            for option in tried:
                try:
                    found[option] = planned(ranks.with_option(option))
                except BudgetTooSmall as error:
                    refusal = error
            own = [found[option].seconds if option in found else math.inf for option in tried]
            seconds |= zip(tried, map(max, self._on_each(own)), strict=True)
        if not (fastest := fastest_by_groups(seconds)):
            self._refuse(refusal)
        balanced = {
            count: self._by_speed(found[each], ranks.with_option(each), planned) for count, each in fastest.items()
        }
        groups = min(balanced, key=lambda count: balanced[count].slowest)
        (plan, inputs), _, uneven = balanced[groups]
        by_groups = {count: each.slowest for count, each in balanced.items()}
        reasons = option_reasons(fastest[groups], seconds, self._parallel.group.size, by_groups) + uneven
        if inputs is not None:
            self._inputs_by_shape[shape] = inputs
            self.calibration_recorder.studies(plan, inputs)
            shared = shared_weights_reason(plan, self._sharing)
            reasons += [exchange_reason(inputs.footprint), *([] if shared is None else [shared])]
        return plan.model_copy(update={"reasons": (*plan.reasons, *reasons)})

    def _by_speed(
        self, equal: Measured, parallel: ContextParallel, planned: Callable[[ContextParallel], Measured]
    ) -> Balanced:
        """Return what is `planned` with fewer rows for slower ranks, or `equal` where that is as fast. Collective.

        Each rank's share is by the time that it needs with equal ones.
        """
        (every,) = self._on_each([equal.seconds])
        if parallel.rows.size == 1 or max(every) <= UNEVEN * min(every) or not min(every):
            return Balanced(equal, max(every), [])
        shares = [round(min(every) / seconds, SHARE_DIGITS) for seconds in every]
        try:
            other = planned(parallel.with_shares(shares))
        except BudgetTooSmall:
            other = None
        (by_speed,) = self._on_each([math.inf if other is None else other.seconds])
        if other is None or max(by_speed) >= max(every):
            return Balanced(equal, max(every), [])
        return Balanced(other, max(by_speed), [shares_reason(shares, max(by_speed), max(every))])

    def _on_each(self, seconds: Sequence[float]) -> list[list[float]]:
        """Return what each of `seconds` is on every rank. Collective."""
        group = self._parallel.group
        with group.call():
            return torch.stack(group.all_gather(torch.tensor(seconds, dtype=torch.float64))).T.tolist()

    def _refuse(self, refusal: BudgetTooSmall | None) -> NoReturn:
        """Raise BudgetTooSmall, the same on all ranks: the `refusal` of the first rank that has one. Collective."""
        facts = {} if refusal is None else {name: refusal.facts.get(name) for name in AGREED_FACTS}
        group = self._parallel.group
        with group.call():
            told = [json.loads(each) for each in group.all_gather_text(json.dumps([str(refusal or ""), facts]))]
        rank, (text, its) = next((rank, each) for rank, each in enumerate(told) if each[0])
        raise BudgetTooSmall(f"rank {rank}: {text}", rank=rank, **its)


def _on_ranks(plan: Plan, parallel: ContextParallel) -> Plan:
    """Return `plan` for a rank of `parallel`."""
    vae = plan.vae.model_copy(update=parallel.autoencoders.fields)
    return plan.model_copy(update=parallel.choices | {"vae": vae})
