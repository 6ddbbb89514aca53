"""What a footprint leaves out, as no plan within the budget could be faster by it, and what is measured after all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from a_few import a_few
from simulator.conftest import ACCELERATOR, MakeCards
from tightfit import Budget, BudgetTooSmall, Footprint, Plan, make_plan
from tightfit.measure import forked_work
from tightfit.plan.default_rates import computer_with
from tightfit.plan.missing import GAIN
from tightfit.plan.planner import find_missing
from tightfit.run.calibration import CalibrationStore, PlanningInputs
from tightfit.run.footprints import Measurer
from tightfit.run.limits import Limits
from tightfit.run.strip_profiles import AutoencoderStripProfiles
from tightfit.schema.footprint import OPTIONAL_PARTS, STRIP_OPTIONS, Phase, Variant
from tiny_pipelines import CASES, run

MIB = 2**20
(SDXL,) = (case for case in CASES if case.name == "StableDiffusionXL")
REQUEST = tightfit.Request(height=256, width=256, steps=4)
SIZES = [int(MIB * 2.1**power) for power in range(1, 12)]
SMALLEST = OPTIONAL_PARTS[-1]  # strips, with maps in host memory
CARD = ACCELERATOR.model_copy(update={"bytes": 2**40, "fixed_bytes": 0})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins and rings as small as the pipelines, and strips that are measured one by one, as of clips."""
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 64 * 1024)
    monkeypatch.setattr("tightfit.run.strip_profiles.QUICK", 0)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, part by part."""
    import tightfit.run.footprints as module

    parts: list[str] = []
    in_strips, in_variants = AutoencoderStripProfiles.with_strips, module.measure_variants

    def with_strips(calls: AutoencoderStripProfiles, footprint: Footprint, part: str) -> Footprint:
        parts.append(part)
        return in_strips(calls, footprint, part)

    def measure_variants(*args: Any) -> tuple[Variant, ...]:
        parts.append("variants")
        return in_variants(*args)

    monkeypatch.setattr(AutoencoderStripProfiles, "with_strips", with_strips)
    monkeypatch.setattr(module, "measure_variants", measure_variants)
    return parts


def planned(footprint: Footprint, size: int) -> Plan | None:
    try:
        return make_plan(footprint, computer_with(CARD), Budget(device=size))
    except BudgetTooSmall:
        return None


def seconds_of(plan: Plan | None) -> float:
    return float("inf") if plan is None else sum(phase.seconds for phase in plan.forecast)


def missing_within(size: int) -> Callable[[Footprint], Sequence[str]]:
    return lambda known: PlanningInputs(known, computer_with(CARD), CalibrationStore(None, CARD)).missing(
        Limits(Budget(device=size))
    )


def measured(folder: Path, size: int) -> Footprint:
    return Measurer(folder).measure(REQUEST, None, missing_within(size))


def as_measured(whole: Footprint, size: int) -> Footprint:
    """`whole`, as far as it is measured for a plan within `size` bytes."""
    known = bare(whole)
    while missing := missing_within(size)(known):
        known = known.merged_with(with_parts(whole, missing[:1]))
    return known


def bare(whole: Footprint) -> Footprint:
    return with_parts(whole, ())


def with_parts(whole: Footprint, parts: Sequence[str]) -> Footprint:
    """`whole` without what was measured beside the usual way, but for these `parts` of it."""
    some = [STRIP_OPTIONS[part] for part in parts if part in STRIP_OPTIONS]

    def kept(phase: Phase) -> Phase:
        sizes = {(phase.strip_limit(divisor), maps) for divisor, maps in some}
        return phase.model_copy(
            update={"strip_options": tuple(w for w in phase.strip_options if (w.strip_bytes, w.feature_maps) in sizes)}
        )

    return whole.model_copy(
        update={
            "phases": tuple(map(kept, whole.phases)),
            "variants": whole.variants if "variants" in parts else (),
            "not_measured": tuple(part for part in OPTIONAL_PARTS if part not in parts),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", a_few(["StableDiffusionXL", "Flux"], "Flux"))
def test_no_plan_is_slower_and_none_is_refused_for_it(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    whole = Measurer(case.make(4)).measure(REQUEST)
    assert whole.not_measured == ()
    assert any(phase.strip_options for phase in whole.phases)
    left = set()
    for size in SIZES:
        known = as_measured(whole, size)
        left.add(known.not_measured)
        plan, best = planned(known, size), planned(whole, size)
        assert (plan is None) == (best is None), size
        if plan is not None:
            assert seconds_of(plan) <= (1 + 2 * GAIN) * seconds_of(best), size
    assert OPTIONAL_PARTS in left
    assert () not in left
    assert any(0 < len(parts) < len(OPTIONAL_PARTS) for parts in left)


def test_what_is_measured_is_what_could_gain(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is there, nothing; where nothing fits, what needs least; what is asked for, that alone."""
    measurer = Measurer(SDXL.make(4))
    monkeypatch.setattr(measurer, "_own", "")  # nothing is kept
    assert measurer.measure(REQUEST, None, missing_within(2**34)).not_measured == OPTIONAL_PARTS
    assert done == []
    known = measurer.measure(REQUEST, None, missing_within(1))
    assert done
    assert set(done) <= {"variants", SMALLEST}
    assert set(known.not_measured) == set(OPTIONAL_PARTS).difference(done)
    done.clear()
    known = measurer.measure(REQUEST, None, lambda known: [part for part in known.not_measured if part == SMALLEST])
    assert set(known.not_measured) == set(OPTIONAL_PARTS) - {SMALLEST}
    assert done == [SMALLEST]


@pytest.mark.slow
@pytest.mark.parametrize("name", a_few(["StableDiffusionXL", "Flux"], "StableDiffusionXL"))
def test_what_would_do_where_nothing_fits_is_known(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    whole = Measurer(case.make(4)).measure(REQUEST)
    with pytest.raises(BudgetTooSmall) as best:
        make_plan(whole, computer_with(CARD), Budget(device=1))
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(as_measured(whole, 1), computer_with(CARD), Budget(device=1))
    assert error.value.facts["needed_bytes"] == best.value.facts["needed_bytes"]
    needed = int(str(error.value.facts["needed_bytes"]))
    assert planned(as_measured(whole, needed), needed) is not None


def test_a_footprint_of_everything_misses_nothing() -> None:
    whole = Measurer(SDXL.make()).measure(REQUEST)
    assert find_missing(whole, computer_with(CARD), Budget(device=1)) == ()
    assert find_missing(bare(whole), computer_with(CARD), Budget(devices={"a": 1, "b": 1})) == OPTIONAL_PARTS


def test_parts_that_are_known_of_one_call_go_together() -> None:
    whole = Measurer(SDXL.make(4)).measure(REQUEST)
    first, second = with_parts(whole, OPTIONAL_PARTS[1:4]), with_parts(whole, (OPTIONAL_PARTS[0], *OPTIONAL_PARTS[4:]))
    assert first.merged_with(second) == second.merged_with(first) == whole
    other = Measurer(SDXL.make(4)).measure(REQUEST.model_copy(update={"steps": 5}), None, lambda _: ())
    assert first.merged_with(other) == first


@pytest.mark.slow
def test_one_that_was_kept_is_found_again_where_it_is_enough(tiny_model: Path, done: list[str]) -> None:
    kept = measured(tiny_model, 2**34)
    assert (kept.not_measured, done) == (OPTIONAL_PARTS, [])
    assert measured(tiny_model, 2**35) == kept
    more = measured(tiny_model, 1)
    assert set(more.not_measured) == set(OPTIONAL_PARTS).difference(done)
    before = list(done)
    assert before
    assert measured(tiny_model, 2**35) == more  # more is known by now
    assert done == before
    whole = Measurer(tiny_model).measure(REQUEST)  # what is known already is not measured again
    assert whole.not_measured == ()
    assert sorted(done) == sorted(OPTIONAL_PARTS)


@pytest.mark.slow
def test_what_was_left_out_is_measured_of_the_same_call_once_memory_is_short(
    make_cards: MakeCards, done: list[str]
) -> None:
    """In the middle of a call, between two steps, the card has less than the plan wanted."""
    (card,) = make_cards(capacity=2**31)
    pipe = SDXL.make(12)
    wanted = run(pipe, SDXL)
    fitted = tightfit.fit(pipe, budget=2**30, device="simulated:0")
    assert torch.allclose(run(pipe, SDXL).cpu(), wanted, atol=1e-5)
    assert done == []
    before = fitted.plan
    card.allocator.empty_cache()
    card.allocator.capacity = int(0.7 * before.predicted_peak("simulated:0"))
    assert torch.allclose(run(pipe, SDXL).cpu(), wanted, atol=1e-5)
    assert fitted.plan != before
    assert done


def test_a_denoiser_with_a_forward_of_its_own_works_in_parts_too() -> None:
    pipe = SDXL.make(4)
    usual = [variant.cfg for variant in Measurer(pipe).measure(REQUEST).variants]
    assert "sequential" in usual
    pipe.unet.forward = functools.partial(type(pipe.unet).forward, pipe.unet)  # as hooks of others leave it
    assert [variant.cfg for variant in Measurer(pipe).measure(REQUEST).variants] == usual


def test_strips_of_a_picture_are_measured_together(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.run.strip_profiles.QUICK", 1000)
    measurer = Measurer(SDXL.make(4))
    monkeypatch.setattr(measurer, "_own", "")
    known = measurer.measure(
        REQUEST, None, lambda known: [part for part in known.not_measured if part in STRIP_OPTIONS]
    )
    assert (known.not_measured, len(done)) == (("variants",), 1)
    assert any(len(phase.strip_options) == len(STRIP_OPTIONS) for phase in known.phases)


@pytest.mark.parametrize(("quick", "cores", "least"), [(0, 2, 6), (10**6, 6, 7), (10**6, 2, 3)])
def test_copies_of_the_process_measure_the_same(
    quick: int, cores: int, least: int, copies: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clips' autoencoders and of pictures', whose strip options are shared out among cores.

    Allocations of earlier variants change a few bytes of later ones.
    """
    monkeypatch.setattr("tightfit.run.strip_profiles.QUICK", quick)
    monkeypatch.setattr("tightfit.run.strip_profiles.usable_cores", lambda: cores)
    ours = Measurer(SDXL.make(4))
    monkeypatch.setattr(ours, "_own", "")  # nothing is kept
    found = ours.measure(REQUEST)
    assert len(copies) >= least
    monkeypatch.setattr(forked_work, "_may_fork", lambda copies: False)
    alone = ours.measure(REQUEST)
    assert found.phases == alone.phases
    kinds = [[each.model_copy(update={"phases": ()}) for each in some.variants] for some in (found, alone)]
    assert kinds[0] == kinds[1]
    for one, other in zip(found.variants, alone.variants, strict=True):
        assert one.phases[0].allocator_bytes == pytest.approx(other.phases[0].allocator_bytes, rel=0.01)
