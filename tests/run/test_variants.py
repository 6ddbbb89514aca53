"""Denoisers that work on parts: which ways a footprint offers, and that a plan which takes one comes true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plan.test_planner import component, passes_of, phase
from tightfit import Budget, Footprint, Machine, Request, make_plan, measure_footprint
from tightfit.catalog.known import known_card
from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.run.simulate import SimulationRun
from tightfit.run.variants import measure_variants
from tightfit.schema.footprint import Phase, Variant
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES

pytestmark = pytest.mark.usefixtures("shared_footprints")

MIB = 2**20


def footprint_of(batch: int, room: int = 1000 * MIB) -> Footprint:
    part = component("unet", "denoiser", [MIB], 0)
    done = passes_of(part, [10**6], 2, room)
    phases = (phase("denoise", done, room),)
    return Footprint(pipeline="Tried", components=(part,), request=Request(batch=batch), phases=phases)


def played(room: Callable[[Variant], int]) -> Callable[[Variant], tuple[Phase, ...]]:
    part = component("unet", "denoiser", [MIB], 0)
    return lambda variant: (phase("denoise", passes_of(part, [10**6], 2, MIB), room(variant)),)


def asked(found: tuple[Variant, ...]) -> list[tuple[object, ...]]:
    return [(v.cfg, v.max_batch, v.ffn_chunk and v.ffn_chunk // MIB, v.by_blocks) for v in found]


def test_what_saves_nothing_is_left_out() -> None:
    assert measure_variants(footprint_of(1), played(lambda variant: 960 * MIB)) == ()


def test_the_finer_is_tried_as_long_as_it_saves() -> None:
    def room(variant: Variant) -> int:
        whole = 600 if variant.splits_batch else 1000
        return (whole - 100 * (variant.ffn_chunk is not None) + 50 * variant.by_blocks) * MIB

    assert asked(measure_variants(footprint_of(1), played(room))) == [
        (None, None, 125, False),
        ("sequential", None, None, False),
        ("sequential", None, 125, False),
        ("sequential", None, None, True),
        ("sequential", None, 125, True),
    ]


def test_a_batch_is_halved_down_to_single_items() -> None:
    found = measure_variants(footprint_of(4), played(lambda variant: 100 * MIB * (variant.max_batch or 10)))
    assert asked(found) == [(None, batch, None, by_blocks) for batch in (4, 2, 1) for by_blocks in (False, True)]


def test_feed_forwards_in_chunks_need_fewer_bytes_in_measurements_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pipe = next(case for case in CASES if case.name == "CogVideoX").make()
    footprint = measure_footprint(pipe, Request(height=512, width=512, steps=2))
    usual = max(footprint.phases[place].allocator_bytes for place in footprint.denoiser_phases)
    (chunked,) = (variant for variant in footprint.variants if variant.ffn_chunk)
    assert chunked.phases[0].allocator_bytes < 0.8 * usual
    held = [work.layer for use in chunked.phases[0].calls[0].block_uses for work in use.layer_work if work.holds]
    assert held
    assert all(".ff." in layer for layer in held)


@pytest.mark.parametrize("kind", [PlanError, RuntimeError])
def test_what_cannot_be_done_is_no_variant(kind: type[Exception]) -> None:
    def play(variant: Variant) -> tuple[Phase, ...]:
        if variant.by_blocks:
            raise kind("injected for block by block")
        return played(lambda _: MIB)(variant)

    found = measure_variants(footprint_of(1), play)
    assert found
    assert not any(variant.by_blocks for variant in found)


@pytest.fixture
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "varied"))  # for all of this file


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_where_little_fits_the_two_predictions_go_apart_and_take_what_was_said() -> None:
    """On a card of that size. Without variants this budget would be refused."""
    request = Request(height=512, width=512, steps=4)
    footprint = measure_footprint("sd-1.5", request)
    usual = max(footprint.phases[place].allocator_bytes for place in footprint.denoiser_phases)
    assert {variant.by_blocks for variant in footprint.variants if variant.cfg} == {False, True}
    assert all(variant.phases[0].allocator_bytes < usual for variant in footprint.variants)
    card = known_card("rtx3060")
    machine = Machine(accelerators=(card,), ram=2**40, pinnable=2**40, cores=1)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(footprint, machine, Budget(device=MIB))
    size = int(str(refused.value.facts["needed_bytes"]))
    plan = make_plan(footprint, machine, Budget(device=size))
    assert plan.components["unet"].cfg == "sequential"
    with pytest.raises(BudgetTooSmall, match="cannot do"):
        make_plan(footprint.model_copy(update={"variants": ()}), machine, Budget(device=size))
    limited = SimulatedCard(0, card.model_copy(update={"bytes": size}), Host())
    use_cards([limited])
    try:
        stage = SimulationRun("sd-1.5", limited, plan.model_dump(mode="json", exclude={"device"}), request)
        stage.run()
    finally:
        use_cards([])
    told = {phase.name: phase.seconds for phase in plan.forecast}
    (denoise,) = [phase for phase in stage.fitted.report().trace.phases if phase.name == "denoise"]
    assert denoise.seconds == pytest.approx(told["denoise"], rel=0.03)
    assert not stage.fitted.report().trace.notes
