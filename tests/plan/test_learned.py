"""What a call teaches, and what becomes of plans by it: all that holds of plans holds of those too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import (
    CARD,
    CPU_ALONE,
    GIB,
    HERE,
    MIB,
    RATES,
    TAKEN,
    budgets,
    component,
    footprints,
    passes_of,
    phase,
    planned,
    seconds,
)
from tightfit.errors import BudgetTooSmall
from tightfit.plan.calibration import SEVERAL, calibrate, max_other_bytes, measurement_of, stored_in
from tightfit.plan.forecast import add_forecast, simulate
from tightfit.plan.options import variant_of
from tightfit.plan.planner import make_plan
from tightfit.schema.footprint import Footprint, Variant
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.request import Request
from tightfit.schema.results import CallMeasurement, PhaseMeasurement, PhaseTrace, Trace


def call_of(footprint: Footprint, plan: Plan, device: Accelerator, call: int = 2, more: int = 0, **facts: Any) -> Trace:
    """A call as it would be on `device`, if it is as forecasts say, with `more` bytes than that."""
    footprint = footprint.with_variant(variant_of(footprint, plan))
    told = simulate(footprint, plan, device, RATES)
    phases = tuple(
        PhaseTrace(
            name=one.name, start=0.0, seconds=one.seconds, peak_bytes=one.weights + one.allocator_bytes + more,
            peak_weights=one.weights, runs=sum(done.runs for done in phase.calls),
        )
        for one, phase in zip(told, footprint.phases, strict=True)
    )  # fmt: skip
    return Trace(call=call, seconds=sum(one.seconds for one in told), phases=phases, **facts)


def slower(times: float, link: float = 1.0) -> Accelerator:
    """The card with arithmetic, memory and launches `times` as slow, and the link so much faster."""
    rates = {name: rate / times for name, rate in CARD.arithmetic_rates.items()}
    assert CARD.memory_rate
    assert CARD.link_rate
    return CARD.model_copy(
        update={
            "arithmetic_rates": rates, "memory_rate": CARD.memory_rate / times, "link_rate": CARD.link_rate * link,
            "launch_overhead": CARD.launch_overhead * times,
        }
    )  # fmt: skip


def again(
    footprint: Footprint, size: int, experiences: Sequence[CallMeasurement], machine: Machine = HERE
) -> Plan | None:
    try:
        return make_plan(footprint, machine, Budget(device=size), measurements=experiences)
    except BudgetTooSmall:
        return None


measured_phase = st.builds(
    PhaseMeasurement,
    name=st.sampled_from(["encode", "denoise", "decode", "dream"]),
    runs=st.integers(1, 8),
    predicted_seconds=st.just(1.0),
    seconds=st.just(1.0),
    predicted_bytes=st.just(1),
    peak_bytes=st.just(1),
    activations=st.just(1),
    time_scale=st.none() | st.floats(1 / 50, 50),
    extra_bytes=st.just(0) | st.integers(0, GIB),
)
experiences = st.lists(
    st.builds(
        CallMeasurement,
        plan=st.just("a"),
        first_call=st.booleans(),
        phases=st.lists(measured_phase, max_size=4).map(tuple),
    ),
    max_size=4,
)


@pytest.mark.parametrize("machine", [HERE, CPU_ALONE], ids=["card", "cpu"])
@settings(deadline=None, max_examples=12)
@given(footprint=footprints(), one=budgets, other=budgets, taught=experiences)
def test_plans_by_experience_keep_to_what_holds_of_plans(
    machine: Machine, footprint: Footprint, one: int, other: int, taught: list[CallMeasurement]
) -> None:
    """Never over budget; more is never slower nor refused; the same from the same; nothing that only fits by hope."""
    taken = TAKEN if machine is CPU_ALONE else 0
    less, more = (again(footprint, size, taught, machine) for size in sorted((one, other)))
    for plan, size in ((less, min(one, other)), (more, max(one, other))):
        if plan is not None:
            assert max(told.peak_bytes for told in plan.forecast) + taken <= size
            assert plan.lossless
            assert (
                planned(footprint, size, machine=machine) is not None
            )  # what was learned never makes anything smaller
    if less is not None:
        assert more is not None
        assert seconds(more) <= seconds(less) * (1 + 1e-9)
        assert again(footprint, min(one, other), taught, machine) == less


@settings(deadline=None, max_examples=12)
@given(footprints(), budgets, st.floats(0.4, 3.0), st.booleans())
def test_a_call_that_took_longer_is_foreseen_the_next_time(
    footprint: Footprint, size: int, times: float, first: bool
) -> None:
    """Whatever tells a pace tells the right one; what does not wait for weights, and has passes enough, tells it."""
    plan = planned(footprint, size)
    if plan is None:
        return
    truth = simulate(footprint, plan, slower(times), RATES)
    taught = measurement_of(footprint, plan, CARD, call_of(footprint, plan, slower(times), 2 - first), RATES)
    found = simulate(calibrate(footprint, [taught], {}).footprint, plan, CARD, RATES)
    for number, one in enumerate(taught.phases):
        resident = all(
            plan.components[done.component].placement == "resident" for done in footprint.phases[number].calls
        )
        whole = plan.vae.strips is None or one.name != "decode"  # of strips, what is copied is no arithmetic
        if one.time_scale is not None:
            assert found[number].seconds == pytest.approx(truth[number].seconds, rel=0.025)
        elif one.seconds and resident and whole:
            assert first or times < 1
            assert one.runs < SEVERAL
        assert one.extra_bytes == 0


@settings(deadline=None, max_examples=12)
@given(footprints(), budgets, st.lists(st.integers(0, 3 * GIB), min_size=3, max_size=3), st.integers(1, 2))
def test_what_ran_within_a_budget_is_never_refused_for_it(
    footprint: Footprint, size: int, more: list[int], call: int
) -> None:
    """However much more than was said it took: the same plan is foreseen to take what it took.

    In later calls a phase may hold as much as the next one, whose weights have come: that teaches nothing.
    """
    plan = planned(footprint, size)
    if plan is None:
        return
    most = size // (2 * MIB) * 2 * MIB  # an allocator takes whole segments
    trace = call_of(footprint, plan, CARD, call)
    phases = [
        seen.model_copy(update={"peak_bytes": max(min(seen.peak_bytes + grown, most), seen.peak_bytes)})
        for seen, grown in zip(trace.phases, more, strict=True)
    ]
    taught = measurement_of(footprint, plan, CARD, trace.model_copy(update={"phases": tuple(phases)}))
    told = add_forecast(calibrate(footprint, [taught], {}).footprint, plan, CARD).forecast
    for foreseen, seen in zip(told, phases, strict=True):
        assert foreseen.peak_bytes <= size
        assert call == 2 or seen.peak_bytes <= foreseen.peak_bytes
    assert again(footprint, size, [taught]) is not None


SIZES = [200 * MIB] * 4
UNET, VAE = component("unet", "denoiser", SIZES, 0), component("vae", "autoencoder", [100 * MIB], 0)
SMALL = Footprint(
    pipeline="Tried", components=(UNET, VAE), request=Request(height=64),
    phases=(
        phase("denoise", passes_of(UNET, [10**11] * 4, 8, 40 * MIB), 40 * MIB),
        phase("decode", passes_of(VAE, [10**11], 1, 90 * MIB, "decode"), 90 * MIB),
    ),
)  # fmt: skip
WHOLE = make_plan(SMALL, HERE, Budget(device=4 * GIB))


def time_scales(experience: CallMeasurement) -> list[float | None]:
    return [one.time_scale for one in experience.phases]


def said(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [f"{reason.decision}: {reason.because}" for reason in plan.reasons]


def test_a_plan_says_what_was_measured() -> None:
    trace = call_of(SMALL, WHOLE, slower(1.18), more=200 * MIB)
    plan = again(SMALL, 4 * GIB, [measurement_of(SMALL, WHOLE, CARD, trace)] * 3)
    assert "times of denoise are 1.18 × what rates say: measured in 3 runs on this machine" in said(plan)
    (bytes_more,) = (line for line in said(plan) if line.startswith("decode takes "))
    assert bytes_more.endswith("MiB more than shapes say: measured in 3 runs on this machine")
    as_foreseen = again(SMALL, 4 * GIB, [measurement_of(SMALL, WHOLE, CARD, call_of(SMALL, WHOLE, CARD))])
    assert "times and bytes are what rates and shapes say: measured in 1 run on this machine" in said(as_foreseen)
    assert as_foreseen is not None
    assert as_foreseen.model_copy(update={"reasons": WHOLE.reasons}) == WHOLE
    assert not [line for line in said(WHOLE) if "measured in" in line]


def test_what_waits_for_weights_tells_nothing_about_arithmetic() -> None:
    """At an eighth of the link a step takes several times as long, and arithmetic is as fast as ever."""
    plan = make_plan(SMALL, HERE, Budget(device=500 * MIB))
    assert plan.components["unet"].placement == "stream"
    late = measurement_of(SMALL, plan, CARD, call_of(SMALL, plan, slower(1.0, link=1 / 8)))
    assert late.phases[0].seconds > 2 * late.phases[0].predicted_seconds
    assert time_scales(late)[0] is None


def test_what_is_done_once_is_no_rate() -> None:
    once = measurement_of(SMALL, WHOLE, CARD, call_of(SMALL, WHOLE, slower(2.0), call=1))
    assert once.first_call
    assert time_scales(once) == [pytest.approx(2.0, rel=0.01), None]  # one decode: was that loading kernels?
    later = measurement_of(SMALL, WHOLE, CARD, call_of(SMALL, WHOLE, slower(1.5)))
    assert time_scales(later) == [pytest.approx(1.5, rel=0.01)] * 2
    behind = measurement_of(SMALL, WHOLE, CARD, call_of(SMALL, WHOLE, slower(1.5)), spread=True)
    assert time_scales(behind)[1] is None
    found = calibrate(SMALL, [once, once, later], {}).footprint
    assert found.phases[0].time_scale == pytest.approx(
        1.5, rel=0.01
    )  # where there are later calls, first ones count nothing


def test_faster_is_not_believed_where_something_may_have_been_done_ahead() -> None:
    """Weights that came, in later calls; kernels of one pass that were launched before."""
    moving = ComponentPlan(placement="offload")
    plan = WHOLE.model_copy(update={"components": WHOLE.components | {"unet": moving}})
    for call, told in ((1, True), (2, False)):
        taught = measurement_of(SMALL, plan, CARD, call_of(SMALL, plan, slower(0.7), call))
        assert [time_scale is not None for time_scale in time_scales(taught)] == [told, False]
    taught = measurement_of(SMALL, WHOLE, CARD, call_of(SMALL, WHOLE, slower(0.7)))
    assert time_scales(taught) == [pytest.approx(0.7, rel=0.01), None]


def test_another_number_of_passes_is_another_call() -> None:
    trace = call_of(SMALL, WHOLE, slower(2.0))
    denoise, decode = trace.phases
    more_steps = trace.model_copy(update={"phases": (denoise.model_copy(update={"runs": 30}), decode)})
    assert time_scales(measurement_of(SMALL, WHOLE, CARD, more_steps))[0] is None


def test_a_phase_that_nobody_foresaw_is_passed_over() -> None:
    trace = call_of(SMALL, WHOLE, slower(2.0))
    checker = trace.phases[1].model_copy(update={"name": "safety_checker"})
    taught = measurement_of(SMALL, WHOLE, CARD, trace.model_copy(update={"phases": (checker, *trace.phases)}))
    assert [one.name for one in taught.phases] == ["denoise", "decode"]


def test_of_several_calls_the_median_tells_times_and_the_highest_peak_bytes() -> None:
    calls = [call_of(SMALL, WHOLE, slower(times), more=int(times * 80 * MIB)) for times in (1.2, 9.0, 1.3, 1.1)]
    taught = [measurement_of(SMALL, WHOLE, CARD, call) for call in calls]
    found = calibrate(SMALL, taught, {}).footprint.phases[0]
    assert found.time_scale == pytest.approx(1.2, rel=0.01)
    assert found.allocator_bytes - 40 * MIB == max(one.phases[0].extra_bytes for one in taught) > 0


def test_what_others_have_on_the_device_is_not_taken_for_activations() -> None:
    beside = max_other_bytes(CARD) + 1
    trace = call_of(SMALL, WHOLE, CARD, more=GIB, other_bytes=beside)
    assert [one.extra_bytes for one in measurement_of(SMALL, WHOLE, CARD, trace).phases] == [0, 0]
    less = trace.model_copy(update={"other_bytes": beside - 1})
    assert all(one.extra_bytes for one in measurement_of(SMALL, WHOLE, CARD, less).phases)


def test_eight_bits_teach_for_eight_bits() -> None:
    """Widening weights takes time that a footprint does not tell of."""
    stored = ComponentPlan(storage="float8_e4m3fn")
    plan = WHOLE.model_copy(update={"components": WHOLE.components | {"unet": stored}})
    assert stored_in(plan) == {"unet": "float8_e4m3fn"}
    taught = measurement_of(SMALL, plan, CARD, call_of(SMALL, plan, slower(4.0)))
    assert calibrate(SMALL, [taught], {}) == (SMALL, ())
    assert calibrate(SMALL, [taught], stored_in(plan)).reasons


def test_a_plan_is_known_by_what_it_decides() -> None:
    trace = call_of(SMALL, WHOLE, CARD)
    other = WHOLE.model_copy(update={"reasons": (), "forecast": ()})
    smaller = make_plan(SMALL, HERE, Budget(device=500 * MIB))
    names = [measurement_of(SMALL, plan, CARD, trace).plan for plan in (WHOLE, other, smaller)]
    assert names[0] == names[1] != names[2]


def test_what_a_variant_took_is_learned_of_all_ways_of_working() -> None:
    """Its passes are others than usual; what is learned of their pace is true of the usual ones too."""
    part = component("unet", "denoiser", [MIB] * 4, 0)
    usual = passes_of(part, [10**11] * 4, 8, GIB)
    apart = passes_of(part, [5 * 10**10] * 4, 16, GIB // 4)
    footprint = Footprint(
        pipeline="Tried", components=(part,), request=Request(height=64), phases=(phase("denoise", usual, GIB),),
        variants=(Variant(cfg="sequential", phases=(phase("denoise", apart, GIB // 4),)),),
    )  # fmt: skip
    plan = make_plan(footprint, HERE, Budget(device=GIB // 2))
    assert plan.components["unet"].cfg == "sequential"
    lesson = measurement_of(footprint, plan, CARD, call_of(footprint, plan, slower(2.0)), RATES)
    assert lesson.phases[0].time_scale == pytest.approx(2.0, rel=0.01)
    corrected = calibrate(footprint, [lesson], {}).footprint
    assert {done.time_scale for done in (*corrected.phases[0].calls, *corrected.variants[0].phases[0].calls)} == {
        lesson.phases[0].time_scale
    }
    second = make_plan(footprint, HERE, Budget(device=GIB // 2), measurements=[lesson])
    assert second.forecast[0].seconds == pytest.approx(2 * plan.forecast[0].seconds, rel=0.02)
