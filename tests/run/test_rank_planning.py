"""What a plan predicts of one rank of several, beside what the engine does there: on a simulated card."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.conftest import ACCELERATOR
from tightfit import Budget, BudgetTooSmall, Machine, Plan
from tightfit.apply.context_parallel.doubled_inputs import DoubledInputs
from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.measure.meta_copy import meta_copy
from tightfit.plan.planner import make_plan
from tightfit.run.doubled_calls import doubled_inputs_of
from tightfit.run.footprints import Measurer
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.footprint import ComponentCall, Footprint
from tightfit.schema.machine import EXCHANGES, KernelGroup
from tightfit.schema.plan import ContextAttention
from tightfit.schema.request import Request
from tightfit.schema.step_cache import StepCache
from tiny_pipelines import CASES

WIDER = 16
MARGINS = 80 * 2**20  # bytes that a forecast adds: 32 MiB, cuBLAS's workspace, and up to two pages of 20 MiB
SLOWEST, EARLIEST = 1.2, 1.05  # streamed layers' order is known to the engine in the first step, not to the forecast
LINKED = ACCELERATOR.model_copy(update={"exchange_rate": 2e9, "exchange_latency": 20e-6})
REQUEST = Request(height=128, width=128, steps=3)


class Subject:
    """A pipeline whose rows two ranks share, and which inputs of its denoiser grow."""

    def __init__(self, name: str) -> None:
        (case,) = (case for case in CASES if case.name == name)
        self.pipe = case.make(WIDER)
        self.doubled: dict[str, DoubledInputs | str] = doubled_inputs_of(self.pipe, REQUEST)

    def rank(self, rank: int, attention: ContextAttention, ranks: int = 2) -> ContextParallel:
        return ContextParallel(SimulatedRankGroup(rank, ranks), RowShares.equal(ranks), attention, self.doubled)

    def footprint(self, parallel: ContextParallel | None) -> Footprint:
        return Measurer(self.pipe, parallel=parallel).measure(REQUEST, missing=lambda _: ())

    def simulated(self, plan: Plan, parallel: ContextParallel) -> Any:
        fields = plan.model_copy(update={"device": "simulated:0", **parallel.choices})
        with unlimited_card(LINKED) as card:
            run = SimulationRun(meta_copy(self.pipe), card, fields, REQUEST, parallel=parallel)
            run.run()
            return run.fitted.report().trace


def test_footprints_of_ranks_and_of_step_caches_are_kept_apart() -> None:
    subject = Subject("Flux")
    parallel, cache = subject.rank(0, "ring"), StepCache(strategy="static")
    alone, shared = Measurer(subject.pipe), Measurer(subject.pipe, parallel=parallel)
    assert shared.with_cache(None).question(REQUEST) == shared.question(REQUEST) == alone.on(parallel).question(REQUEST)
    questions = [each.question(REQUEST) for each in (alone, shared, alone.with_cache(cache), shared.with_cache(cache))]
    assert all(questions.count(each) == 1 for each in questions)


def least_plan(footprint: Footprint) -> Plan:
    """The plan within the smallest budget that has one, to 5 %."""
    machine = Machine(accelerators=(LINKED,), ram=2**34, cores=2)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(footprint, machine, Budget(device=2**20))
    return make_plan(footprint, machine, Budget(device=int(refused.value.facts["needed_bytes"] * 1.05)))


@pytest.fixture(scope="module", params=["Flux", pytest.param("StableDiffusion", marks=pytest.mark.slow)])
def subject(request: Any) -> Subject:
    return Subject(request.param)


@pytest.mark.parametrize(
    ("attention", "rank"),
    [
        ("ring", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("gathered", 0), ("gathered", 1), ("ring", 0)]),
        *(pytest.param("heads", rank, marks=pytest.mark.slow) for rank in (0, 1)),
    ],
)
def test_a_rank_takes_what_its_plan_says(subject: Subject, attention: ContextAttention, rank: int) -> None:
    parallel = subject.rank(rank, attention)
    footprint = subject.footprint(parallel)
    plan = least_plan(footprint)
    assert any(part.placement == "stream" for part in plan.components.values())
    trace = subject.simulated(plan, parallel)
    for forecast, phase in zip(plan.forecast, trace.phases, strict=True):
        assert phase.peak_reserved <= forecast.peak_bytes <= phase.peak_reserved + MARGINS
    predicted, spent = (sum(phase.seconds for phase in phases) for phases in (plan.forecast, trace.phases))
    assert SLOWEST * spent >= predicted >= spent / EARLIEST


def test_exchanges_are_counted_as_they_are_sent(subject: Subject) -> None:
    parallel = subject.rank(0, "gathered")
    (denoise,) = (phase for phase in subject.footprint(parallel).phases if phase.name == "denoise")
    (call,) = denoise.calls
    counted = sum(group.traffic for group in work_of(call) if group.kind in EXCHANGES)
    with unlimited_card(LINKED) as card:
        run = SimulationRun(meta_copy(subject.pipe), card, {"level": 0}, REQUEST, parallel=parallel)
        group = run.fitted.parallel.group  # type: ignore[union-attr]
        sent: list[int] = []
        denoiser = next(iter(run.denoisers.values()))

        def forward(*args: Any, _inner: Any = denoiser._forward, **kwargs: Any) -> Any:
            before = group.bytes_sent
            found = _inner(*args, **kwargs)
            sent.append(group.bytes_sent - before)
            return found

        denoiser._forward = forward
        run.run()
    assert sent
    assert all(abs(size - counted) <= 0.1 * counted for size in sent)  # of each exchange, the more of both directions


def work_of(call: ComponentCall) -> list[KernelGroup]:
    return [group for use in call.block_uses for group in use.work]


def test_more_ranks_need_less(subject: Subject) -> None:
    whole, halves, quarters = (
        max(phase.peak for phase in subject.footprint(parallel).phases if phase.name == "decode")
        for parallel in (None, subject.rank(0, "gathered"), subject.rank(0, "gathered", ranks=4))
    )
    assert halves <= 0.7 * whole  # each has the whole picture in the end
    assert quarters <= 0.5 * whole
