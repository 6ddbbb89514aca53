"""What is measured of a rank in one of two guidance groups, beside what the engine does there: on a simulated card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from run.test_rank_planning import EARLIEST, LINKED, MARGINS, REQUEST, SLOWEST, WIDER, least_plan
from tightfit.apply.context_parallel.doubled_inputs import DoubledInputs
from tightfit.apply.context_parallel.executor import ContextParallel
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.measure.meta_copy import meta_copy
from tightfit.run.doubled_calls import doubled_inputs_of
from tightfit.run.footprints import Measurer
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.footprint import Footprint
from tiny_pipelines import CASES

TWICE = {"true_cfg_scale": 2.0, "negative_prompt": "blurry"}  # Flux calls its denoiser twice in a step then


def guided(pipe: Any, number: int, context: int = 1) -> ContextParallel:
    """The first rank of a guidance group, of two groups of `context` ranks."""
    doubled: Mapping[str, DoubledInputs | str] = doubled_inputs_of(pipe, REQUEST) if context > 1 else {}
    whole, rows, branches = (
        SimulatedRankGroup(*each) for each in ((number * context, 2 * context), (0, context), (number, 2))
    )
    guidance = GuidanceRanks(number, rows, branches)
    return ContextParallel(whole, RowShares.equal(2 * context), "gathered", doubled, guidance=guidance)


def work(footprint: Footprint) -> tuple[int, int]:
    """How often a rank runs the denoiser, and the most bytes of activations meanwhile."""
    (phase,) = (phase for phase in footprint.phases if phase.name == "denoise")
    return sum(call.runs for call in phase.calls), phase.peak


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("Flux", (6, 4, 3)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("Wan", (6, 4, 3)), ("StableDiffusion", (3, 3, 3))]),
    ],
)
def test_a_rank_is_measured_as_it_runs(name: str, runs: tuple[int, int, int]) -> None:
    (case,) = (case for case in CASES if case.name == name)
    pipe = case.make(WIDER)
    request = REQUEST if name != "Flux" else REQUEST.model_copy(update={"arguments": TWICE})
    ranks = [None, guided(pipe, 0), guided(pipe, 1)]
    footprints = [Measurer(pipe, parallel=each).measure(request, missing=lambda _: ()) for each in ranks]
    counted, peaks = zip(*map(work, footprints), strict=True)
    assert counted == runs
    if name == "StableDiffusion":
        assert max(peaks[1:]) <= 0.7 * peaks[0]
    for parallel, footprint in zip(ranks[1:], footprints[1:], strict=True):
        assert parallel is not None
        plan = least_plan(footprint)
        fields = plan.model_copy(update={"device": "simulated:0", **parallel.choices})
        with unlimited_card(LINKED) as card:
            simulation = SimulationRun(meta_copy(pipe), card, fields, request, parallel=parallel)
            simulation.run()
            trace = simulation.fitted.report().trace
        reserved = max(phase.peak_reserved for phase in trace.phases)  # a phase may have more from the one before
        assert reserved <= plan.predicted_peak(plan.device) <= reserved + MARGINS
        predicted, spent = (
            next(phase.seconds for phase in phases if phase.name == "denoise")
            for phases in (plan.forecast, trace.phases)
        )
        assert SLOWEST * spent >= predicted >= spent / EARLIEST
