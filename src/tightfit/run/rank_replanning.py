"""Plans within a budget for one rank of several that share a pipeline's rows: decided by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.errors import BudgetTooSmall
from tightfit.measure.call_log import CallLog
from tightfit.plan.rank_attention import alone_reason, attention_reason, exchange_reason, shared_weights_reason
from tightfit.run.calibration import PlanningInputs
from tightfit.run.call_arguments import CallShape
from tightfit.run.footprints import Measurer
from tightfit.run.plan_target import PlanTarget
from tightfit.run.replanning import Replanner
from tightfit.schema.machine import Machine
from tightfit.schema.plan import ContextAttention, Plan
from tightfit.schema.request import Request

__all__ = ["RankReplanner"]


class RankReplanner(Replanner):
    """Makes plans for this rank of `parallel`. Each rank has its own device and budget, and so its own weights there.

    How attention reaches the keys of other ranks must be the same on all of them: of the `ways` the one with which the
    slowest rank is fastest. Where no way fits on every rank, each runs autoencoders whole, in strips if need be; where
    none fits then, all raise BudgetTooSmall.
    """

    retries = False  # the other ranks' calls have ended by then
    keeps_whole = False  # other ranks may have plans that are not kept

    def __init__(
        self, pipe: Any, plan_target: PlanTarget, parallel: ContextParallel, ways: Sequence[ContextAttention]
    ) -> None:
        self._parallel, self._ways = parallel, tuple(ways)
        self._any: Measurer | Exception
        super().__init__(pipe, plan_target)

    def _measurer_of(self, pipe: Any, plan_target: PlanTarget) -> Measurer | Exception:
        try:
            self._any = Measurer(pipe, expandable=plan_target.expandable, parallel=self._parallel)
        except Exception as error:  # raised by third-party code, which copying modules runs
            self._any = error
        return self._any

    def first_plan(self, pipe: Any) -> Plan:
        return self._on_ranks(super().first_plan(pipe))

    def for_direct_calls(self, now: Plan, because: str) -> Plan | None:
        plan = super().for_direct_calls(now, because)
        return plan and self._on_ranks(plan)

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
        try:
            return self._chosen(request, shape, given, log, shares=True)
        except BudgetTooSmall as refusal:  # on all ranks
            plan = self._chosen(request, shape, given, log, shares=False)
            return plan.model_copy(update={"reasons": (*plan.reasons, alone_reason(refusal))})

    def _chosen(
        self, request: Request, shape: CallShape, given: Mapping[str, Any] | None, log: CallLog | None, *, shares: bool
    ) -> Plan:
        """Return the plan with the kind of attention that all ranks agree on; `shares`: rows of autoencoders, too."""
        found: dict[ContextAttention, tuple[Plan, PlanningInputs | None]] = {}
        refusal = None
        for way in self._ways:
            parallel = replace(self._parallel, attention=way, shares_autoencoders=shares)
            self._measurer = self._any.on(parallel) if isinstance(self._any, Measurer) else self._any
            self._inputs_by_shape.pop(shape, None)
            if log is not None:
                self._logs[shape] = log
            try:
                plan = super()._new(request, shape, given)
            except BudgetTooSmall as error:
                refusal = error
            else:
                found[way] = self._on_ranks(plan, way, shares=shares), self._inputs_by_shape.get(shape)
        seconds = self._agreed({way: _seconds(plan) for way, (plan, _) in found.items()}, refusal)
        way = min(seconds, key=lambda way: seconds[way])
        plan, inputs = found[way]
        if inputs is not None:
            self._inputs_by_shape[shape] = inputs
            self.calibration_recorder.studies(plan, inputs)
        reasons = [] if len(self._ways) == 1 else [attention_reason(way, seconds)]
        if inputs is not None:
            shared = shared_weights_reason(plan, self._sharing)
            reasons += [exchange_reason(inputs.footprint), *([] if shared is None else [shared])]
        return plan.model_copy(update={"reasons": (*plan.reasons, *reasons)})

    def _agreed(
        self, seconds: Mapping[ContextAttention, float], refusal: BudgetTooSmall | None
    ) -> dict[ContextAttention, float]:
        """Return the seconds of the slowest rank by way, of those ways that fit on all ranks."""
        group = self._parallel.group
        own = torch.tensor([seconds.get(way, math.inf) for way in self._ways], dtype=torch.float64)
        with group.call():
            slowest = torch.stack(group.all_gather(own)).amax(0).tolist()
            agreed = {way: each for way, each in zip(self._ways, slowest, strict=True) if each < math.inf}
            if agreed:
                return agreed
            texts = group.all_gather_text("" if refusal is None else str(refusal))
        rank = next(rank for rank, text in enumerate(texts) if text)
        needed = refusal.facts.get("needed_bytes") if refusal is not None else None
        raise BudgetTooSmall(f"rank {rank}: {texts[rank]}", rank=rank, needed_bytes=needed)

    def _on_ranks(self, plan: Plan, way: ContextAttention | None = None, *, shares: bool = True) -> Plan:
        choices = self._parallel.choices | ({} if way is None else {"context_attention": way})
        return plan.model_copy(update=choices | {"vae": plan.vae.model_copy(update={"shared": shares})})


def _seconds(plan: Plan) -> float:
    """The predicted seconds of a call; 0 if nothing is predicted."""
    return sum(phase.seconds for phase in plan.forecast)
