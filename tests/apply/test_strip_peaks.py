"""The bytes that a run in strips is planned with are those that a card's allocator is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
from torch.utils._pytree import tree_flatten

from apply.test_labour import ROWS, on
from apply.test_strips import prepared
from simulator.conftest import ACCELERATOR
from tightfit import fit
from tightfit.apply.activations.strips.called_program import program_of
from tightfit.apply.activations.strips.executor import StripConfig
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph
from tightfit.apply.activations.strips.strip_plan import peak_of_stages
from tightfit.schema.footprint import FeatureMaps
from tightfit.simulator.allocator_replay import ROUGH, least_capacity_of_moves
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_autoencoders import CASES, decode

STRIPS = 50_000  # bytes
QUICK = ["AutoencoderKL", "AutoencoderKLMochi"]
OTHERS = [case.name for case in CASES if case.name not in QUICK and not case.large]


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    card = SimulatedCard(0, ACCELERATOR, Host())
    use_cards([card])
    yield card
    use_cards(())


def planned_and_asked(name: str, maps: FeatureMaps, card: SimulatedCard) -> tuple[int, int]:
    """The planned peak of decoding in strips, and the most bytes that the allocator was asked for."""
    case, model = prepared(name)
    rows = case.only_rows or max(ROWS // case.granule * case.granule, case.least_rows)
    latents = case.latents(rows, 1)
    fitted = fit(model, plan={"level": 0, "vae": {"strips": STRIPS, "feature_maps": maps}}, device="simulated:0")
    there = replace(case, decode_kwargs=lambda batch: {k: on(v) for k, v in case.decode_kwargs(batch).items()})
    given = latents.to("privateuseone:0")
    decode(model, there, given, 1)  # constants come to the card
    before = card.allocator.requested.now
    card.allocator.requested.peak = before
    decode(model, there, given, 1)
    asked = card.allocator.requested.peak - before
    fitted.undo()
    layers, form = tree_flatten(((), case.decode_kwargs(1)))
    try:
        program, mark, _ = program_of(model, type(model), "decode", latents, layers, form)
    except UnsupportedGraph as reason:
        pytest.skip(str(reason))
    strip_plan, moves = StripConfig(program, STRIPS, maps, mark).strip_plan, list[int]()
    peak_of_stages(strip_plan.graph, strip_plan.in_host, strip_plan.passes, moves)
    return max(accumulate(moves)), asked


@pytest.mark.parametrize("maps", ["device", "host"])
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_no_more_is_asked_for_than_is_planned(name: str, maps: FeatureMaps, card: SimulatedCard) -> None:
    planned, asked = planned_and_asked(name, maps, card)
    assert asked <= planned


def test_allocator_bytes_are_those_of_the_same_walk_as_the_peak() -> None:
    case, model = prepared("AutoencoderKL")
    latents = case.latents(ROWS // case.granule * case.granule, 1)
    program, _, _ = program_of(model, type(model), "decode", latents, *tree_flatten(((), case.decode_kwargs(1))))
    strip_plan, moves = StripConfig(program, STRIPS, "device").strip_plan, list[int]()
    peak, allocator_bytes = strip_plan.peak_and_allocator_bytes()
    assert peak == strip_plan.peak == peak_of_stages(strip_plan.graph, strip_plan.in_host, strip_plan.passes, moves)
    assert allocator_bytes == least_capacity_of_moves(moves, expandable=True, within=ROUGH) >= peak.device
