"""What a footprint leaves out, as no plan within the budget could be faster by it, and what is measured after all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import tightfit
from a_few import a_few
from pretend.conftest import ACCELERATOR, MakeCards
from tightfit import Budget, BudgetTooSmall, Footprint, Plan, make_plan
from tightfit.plan.guesses import computer_with
from tightfit.plan.planner import GAIN, find_missing
from tightfit.run.experiences import Basis, Past
from tightfit.run.footprints import Measurer
from tightfit.run.wishes import Limits
from tiny_pipelines import CASES, run

MIB = 2**20
(SDXL,) = (case for case in CASES if case.name == "StableDiffusionXL")
REQUEST = tightfit.Request(height=256, width=256, steps=4)
SIZES = [int(MIB * 2.1**power) for power in range(1, 12)]
CARD = ACCELERATOR.model_copy(update={"bytes": 2**40, "fixed_bytes": 0})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins and rings as small as the pipelines, and link and arithmetic slow enough for the sizes to matter."""
    monkeypatch.setattr("tightfit.plan.parts.CHUNK", 64 * 1024)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, part by part."""
    import tightfit.run.footprints as module

    parts: list[str] = []
    for name, part in (("survey", "ways"), ("measure_variants", "variants")):
        inner = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, inner=inner, part=part, **kw: parts.append(part) or inner(*args, **kw)
        )
    return parts


def planned(footprint: Footprint, size: int) -> Plan | None:
    try:
        return make_plan(footprint, computer_with(CARD), Budget(device=size))
    except BudgetTooSmall:
        return None


def seconds_of(plan: Plan | None) -> float:
    return float("inf") if plan is None else sum(phase.seconds for phase in plan.forecast)


def missing_within(size: int) -> Callable[[Footprint], Sequence[str]]:
    return lambda known: Basis(known, computer_with(CARD), Past(None, CARD)).missing(Limits(Budget(device=size)))


def measured(folder: Path, size: int) -> Footprint:
    return Measurer(folder).measure(REQUEST, None, missing_within(size))


def as_measured(whole: Footprint, size: int) -> Footprint:
    """`whole`, as far as it is measured for a plan within `size` bytes."""
    bare = tuple(phase.model_copy(update={"ways": ()}) for phase in whole.phases)
    known = whole.model_copy(update={"phases": bare, "variants": (), "left_out": ("ways", "variants")})
    while missing := missing_within(size)(known):
        left = tuple(part for part in known.left_out if part != missing[0])
        more = {"phases": whole.phases} if missing[0] == "ways" else {"variants": whole.variants}
        known = known.model_copy(update=more | {"left_out": left})
    return known


@pytest.mark.parametrize("name", a_few(["StableDiffusionXL", "Flux"], "Flux"))
def test_no_plan_is_slower_and_none_is_refused_for_it(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    whole = Measurer(case.make(4)).measure(REQUEST)
    assert whole.left_out == ()
    assert any(phase.ways for phase in whole.phases)
    left = set()
    for size in SIZES:
        known = as_measured(whole, size)
        left.add(known.left_out)
        plan, best = planned(known, size), planned(whole, size)
        assert (plan is None) == (best is None), size
        if plan is not None:
            assert seconds_of(plan) <= (1 + 2 * GAIN) * seconds_of(best), size
    assert {(), ("ways", "variants")} <= left


def test_what_is_measured_is_what_could_gain(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is there, nothing; where nothing fits, everything; what is asked for, that alone."""
    monkeypatch.setattr("tightfit.run.footprints.recalled_footprint", lambda *_: None)
    measurer = Measurer(SDXL.make(4))
    assert measurer.measure(REQUEST, None, missing_within(2**34)).left_out == ("ways", "variants")
    assert done == []
    assert measurer.measure(REQUEST, None, missing_within(1)).left_out == ()
    assert sorted(done) == ["variants", "ways"]
    done.clear()
    assert measurer.measure(
        REQUEST, None, lambda known: [part for part in known.left_out if part == "ways"]
    ).left_out == ("variants",)
    assert done == ["ways"]


def test_a_footprint_of_everything_misses_nothing() -> None:
    whole = Measurer(SDXL.make()).measure(REQUEST)
    assert find_missing(whole, computer_with(CARD), Budget(device=1)) == ()
    bare = whole.model_copy(update={"left_out": ("ways", "variants")})
    assert find_missing(bare, computer_with(CARD), Budget(devices={"a": 1, "b": 1})) == ("ways", "variants")


def test_one_that_was_kept_is_found_again_where_it_is_enough(tiny_model: Path, done: list[str]) -> None:
    kept = measured(tiny_model, 2**34)
    assert (kept.left_out, done) == (("ways", "variants"), [])
    assert measured(tiny_model, 2**35) == kept
    assert measured(tiny_model, 1).left_out == ()
    assert sorted(done) == ["variants", "ways"]
    assert measured(tiny_model, 2**35).left_out == ()  # more is known by now
    assert sorted(done) == ["variants", "ways"]


def test_what_was_left_out_is_measured_of_the_same_call_once_memory_is_short(
    make_cards: MakeCards, done: list[str]
) -> None:
    """In the middle of a call, between two steps, the card has less than the plan wanted."""
    (card,) = make_cards(capacity=2**31)
    pipe = SDXL.make(12)
    wanted = run(pipe, SDXL)
    fitted = tightfit.fit(pipe, budget=2**30, device="pretend:0")
    assert torch.allclose(run(pipe, SDXL).cpu(), wanted, atol=1e-5)
    assert done == []
    before = fitted.plan
    card.allocator.empty_cache()
    card.allocator.capacity = int(0.7 * before.told_peak("pretend:0"))
    assert torch.allclose(run(pipe, SDXL).cpu(), wanted, atol=1e-5)
    assert fitted.plan != before
    assert done


def test_a_denoiser_with_a_forward_of_its_own_works_in_parts_too() -> None:
    pipe = SDXL.make(4)
    usual = [variant.guidance for variant in Measurer(pipe).measure(REQUEST).variants]
    assert "apart" in usual
    pipe.unet.forward = functools.partial(type(pipe.unet).forward, pipe.unet)  # as hooks of others leave it
    assert [variant.guidance for variant in Measurer(pipe).measure(REQUEST).variants] == usual
