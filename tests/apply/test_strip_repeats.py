"""Strips repeat each other where they can, and what a repetition costs is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

from apply.test_strips import prepared
from tightfit.apply.activations.exporting import without_weights
from tightfit.apply.activations.strips.called_program import program_of
from tightfit.apply.activations.strips.cost_estimate import profile_stages
from tightfit.apply.activations.strips.executor import StripConfig
from tightfit.apply.activations.strips.export_graph import capture
from tightfit.apply.activations.strips.op_costs import OpCostCache
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.schedule import StripSchedules
from tightfit.apply.activations.strips.stages import StageGraph
from tightfit.apply.activations.strips.strip_heights import StripHeights
from tightfit.apply.activations.strips.strip_peaks import StripPeak
from tightfit.apply.activations.strips.strip_plan import StripPlan, peak_of_stages
from tightfit.apply.activations.strips.strip_repeats import Repeat, StripRepeats
from tightfit.schema.footprint import FeatureMaps, StripStageProfile

CALLS = {"AutoencoderKL": 32, "AutoencoderKLWan": 24, "AutoencoderKLMochi": 24, "AutoencoderKLLTXVideo": 24}  # rows


class Deep(nn.Module):
    """Its first output rows need a third of the input's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(20))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return F.interpolate(x, scale_factor=2.0, mode="nearest")


def program_called(name: str, rows: int) -> tuple[Program, str]:
    case, model = prepared(name)
    latents = case.latents(rows // case.granule * case.granule, 1)
    program, mark, _ = program_of(model, type(model), "decode", latents, *tree_flatten(((), case.decode_kwargs(1))))
    return program, mark


def costs_of(strip_plan: StripPlan) -> tuple[list[StripStageProfile], StripPeak, list[int]]:
    """Times of stages, peak, and all allocations and frees."""
    trials, moves = OpCostCache(), list[int]()
    with trials.working():
        stages = list(profile_stages(strip_plan, trials, {}))
    return stages, peak_of_stages(strip_plan.graph, strip_plan.in_host, strip_plan.passes, moves), moves


@pytest.mark.parametrize("maps", ["device", "host"])
@pytest.mark.parametrize("name", CALLS)
def test_strips_counted_once_cost_what_all_of_them_cost(
    name: str, maps: FeatureMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, mark = program_called(name, CALLS[name])
    strip_plan = StripConfig(program, 15_000, maps, mark).strip_plan
    at, found = StripRepeats.at, list[Repeat]()

    def noted(self: StripRepeats, strip: int, state: object) -> Repeat:
        found.append(at(self, strip, state))
        return found[-1]

    monkeypatch.setattr(StripRepeats, "at", noted)
    once = costs_of(strip_plan)
    monkeypatch.setattr(StripRepeats, "at", lambda self, strip, state: Repeat(strip, 1, 1))
    assert once == costs_of(strip_plan)
    assert sum(len(each.skipped) for each in found) > 5


def test_a_walk_repeats_what_it_did_in_the_same_state() -> None:
    repeats = StripRepeats([0, 1, 2, 1, 2, 1, 2, 1, 2, 3])
    states = ["", "a", "b", "a", "b", "a"]
    found = [repeats.at(strip, state) for strip, state in enumerate(states)]
    assert found == [*(Repeat(strip, 1, 1) for strip in range(4)), Repeat(4, 2, 2), Repeat(5, 1, 1)]
    assert [*found[4].skipped] == [6, 7]
    assert [found[4].like(strip) for strip in found[4].skipped] == [4, 5]


@pytest.mark.parametrize("states", ["0123456789", "aaaaaaaaaa"])
def test_nothing_is_repeated_in_other_states_or_by_other_kinds(states: str) -> None:
    repeats = StripRepeats([1] * 10 if states[0] != states[1] else range(10))
    assert not any(repeats.at(strip, state).skipped for strip, state in enumerate(states))


@pytest.mark.parametrize(
    ("count", "lead"), [(2, 0.0), (7, 0.0), (7, 0.05), (30, 0.02), (60, 0.0), (60, 0.25), (300, 0.3)]
)
def test_heights_are_equal_but_for_the_first(count: int, lead: float) -> None:
    parts = StripHeights([60, 480]).parts(count, lead)
    assert len(parts) == count
    assert parts[-1] == 1
    rest = [high - low for low, high in pairwise(parts)]
    assert max(rest) - min(rest) < 1e-9
    assert -1e-9 <= parts[0] <= rest[0] + 1e-9
    assert max(rest) <= 1.25 / (count - 1)


def test_numbers_of_strips_near_by_are_taken_if_they_repeat() -> None:
    heights = StripHeights([60, 480])
    assert heights.near(58, 480, 0.0) == 60  # one of 60 rows each
    assert heights.near(58, 59, 0.0) == 58  # there is no other
    assert heights.near(3, 60, 0.0) == 3


@pytest.mark.parametrize("rows", [60, 61])
def test_strips_after_the_first_have_equal_rows_where_many_are_needed_beforehand(rows: int) -> None:
    x = torch.empty(1, 4, rows, 16, device="meta")
    program = capture(without_weights(Deep()), lambda module, x: [module.decode(x)], [x])
    graph = StageGraph(program)
    (stage,) = graph.stages
    strips = StripSchedules(graph, stage).strips(20)
    heights = [rows_of(strip[-1].span) for strip in strips]
    assert sum(heights) == 2 * rows
    assert max(heights[1:]) - min(heights[1:]) <= rows % 2
    assert rows_of(strips[0][0].span) > rows / 3
    if rows == 60:
        assert len(set(strips.kinds)) < len(strips) / 2


def rows_of(span: Span) -> int:
    return span.hi - span.lo


def test_strips_of_one_kind_differ_by_where_they_are_only() -> None:
    x = torch.empty(1, 4, 96, 16, device="meta")
    graph = StageGraph(capture(without_weights(Deep()), lambda module, x: [module.decode(x)], [x]))
    (stage,) = graph.stages
    strips = StripSchedules(graph, stage).strips(24)
    alike: dict[int, list[Sequence[object]]] = {}
    for kind, strip in zip(strips.kinds, strips, strict=True):
        moved = [(step.node, rows_of(step.span), step.span.lo - step.held, len(step.trims)) for step in strip]
        alike.setdefault(kind, []).append(moved)
    assert any(len(some) > 3 for some in alike.values())
    assert all(each == some[0] for some in alike.values() for each in some)
