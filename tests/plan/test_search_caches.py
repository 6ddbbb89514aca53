"""What successive searches share: plans as good as without it, and nothing is simulated twice."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import GIB, HERE, MIB, budgets, component, footprints, legs_of, passes_of, phase
from tightfit.errors import BudgetTooSmall
from tightfit.plan import options as options_module
from tightfit.plan.options import SearchCaches
from tightfit.plan.planner import make_plan
from tightfit.schema.footprint import Footprint, StripProfile
from tightfit.schema.machine import Budget


def with_options(footprint: Footprint, places: list[int]) -> Footprint:
    """The footprint with these of its strip options, as if only they were measured."""
    phases = [
        each.model_copy(update={"strip_options": tuple(each.strip_options[i] for i in places if each.strip_options)})
        for each in footprint.phases
    ]
    return footprint.model_copy(update={"phases": tuple(phases)})


def seconds(footprint: Footprint, size: int, cache: SearchCaches | None) -> float:
    """The seconds of the best plan; infinite if none fits."""
    try:
        plan = make_plan(footprint, HERE, Budget(device=size), cache=cache)
    except BudgetTooSmall:
        return math.inf
    return sum(phase.seconds for phase in plan.forecast)


@settings(deadline=None, max_examples=40)
@given(footprints(), budgets, st.permutations(range(4)))
def test_plans_are_as_good_when_strip_options_are_added(footprint: Footprint, size: int, order: list[int]) -> None:
    """Of two that take equally long, either may be chosen."""
    cache = SearchCaches()
    for count in range(5):
        known = with_options(footprint, order[:count])
        assert seconds(known, size, cache) == pytest.approx(seconds(known, size, None), rel=1e-9)


def test_no_strips_are_simulated_twice_when_another_option_is_added() -> None:
    vae = component("vae", "autoencoder", [100 * MIB] * 4, MIB)
    done = passes_of(vae, [10**11] * 4, 1, GIB)
    options = tuple(
        StripProfile(
            strip_bytes=GIB // share, feature_maps="device", allocator_bytes=GIB // share, host_bytes=0,
            stages=legs_of(done, share, 100 * share),
        )
        for share in (4, 8, 16)
    )  # fmt: skip
    footprint = Footprint(pipeline="Tried", components=(vae,), phases=(phase("decode", done, GIB, options),))
    counted, usual, cache = Counter[tuple[Any, ...]](), options_module._simulated_seconds, SearchCaches()

    def simulated(cost: Any, work: Any) -> float:
        counted[cost.plan.model_dump_json(), *(profile.strip_bytes for runs in work for *_, profile in runs)] += 1
        return usual(cost, work)

    with mock.patch.object(options_module, "_simulated_seconds", simulated):
        for count in (1, 2, 3):
            for size in (150, 200, 300, 430):
                seconds(with_options(footprint, list(range(count))), size * MIB, cache)
    assert len({tuple(strips) for _, *strips in counted}) > 1
    assert set(counted.values()) == {1}
