"""A menu works out few options, and gives the same as if it had worked out all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import CARD, CPU, GIB, MIB, budgets, component, footprints, passes_of, phase
from tightfit.plan.device_search import DeviceSearch
from tightfit.plan.option_search import Option, OptionSet
from tightfit.plan.options import ComponentWorkload, WeightLocation
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator


def fastest(menu: OptionSet, size: int) -> Option | None:
    fitting = [option for option in menu if option.streamed_bytes <= size]
    return min(fitting, key=lambda option: (option.seconds, option.streamed_bytes), default=None)


def tasks(footprint: Footprint, device: Accelerator, where: WeightLocation) -> Iterator[tuple[OptionSet, OptionSet]]:
    """Each component's menu twice, for all ways in which denoisers can work."""
    for variant in (None, *footprint.variants):
        called = footprint.with_variant(variant)
        for part in called.components:
            if variant is None or part.role == "denoiser":
                one, other = (
                    ComponentWorkload(part, called, device).option_set(where, {"disk": 2e9}, variant=variant)
                    for _ in range(2)
                )
                yield one, other


def check(footprint: Footprint, device: Accelerator, where: WeightLocation, sizes: list[int]) -> None:
    for menu, all_of_it in tasks(footprint, device, where):
        for size in sizes:
            race = menu.search(size)
            soonest, found, best = race.seconds, menu.within(size), fastest(all_of_it, size)
            assert (found and found.seconds) == (best and pytest.approx(best.seconds, rel=1e-10))
            assert race.done
            if found is None:
                assert race.seconds == math.inf
            else:
                assert max(soonest, race.seconds) <= found.seconds
        for offer in all_of_it.lazy_options:
            assert offer.seconds <= offer.option.seconds
            assert offer.streamed_bytes <= offer.option.streamed_bytes


about = (
    footprints(), st.sampled_from((CARD, CPU)), st.sampled_from(("resident", "cpu", "disk")),
    st.lists(budgets, min_size=1, max_size=8),
)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(*about)
def test_few_are_worked_out(footprint: Footprint, device: Accelerator, where: WeightLocation, sizes: list[int]) -> None:
    """And none takes less than was said before it was worked out."""
    check(footprint, device, where, sizes)


@pytest.mark.slow
@settings(deadline=None, max_examples=1500)
@given(*about)
def test_few_are_worked_out_often(
    footprint: Footprint, device: Accelerator, where: WeightLocation, sizes: list[int]
) -> None:
    check(footprint, device, where, sizes)


@settings(deadline=None, max_examples=50)
@given(footprints(), budgets, st.none() | budgets)
def test_what_no_chance_beats_is_found(footprint: Footprint, size: int, ram: int | None) -> None:
    """Looking at the most promising ones, offer by offer, ends with the best of all that can be done."""
    search, other = (DeviceSearch(footprint, CARD, {"disk": 2e9}, {}) for _ in range(2))
    every = [branch.find(chance, size) for branch in other.variant_searches for chance in branch.nodes(size, ram)]
    found = search.best(size, ram)
    best = min((each[:3] for each in every if each is not None), default=None)
    assert (found and found[:3]) == (best and (pytest.approx(best[0], rel=1e-10), *best[1:]))


def test_it_is_lazy() -> None:
    """Where all fits, hardly anything is looked at."""
    part = component("unet", "denoiser", [100 * MIB] * 12, MIB)
    done = passes_of(part, [10**12] * 12, 8, MIB)
    footprint = Footprint(pipeline="Tried", components=(part,), phases=(phase("denoise", done, MIB),))
    menu = ComponentWorkload(part, footprint, CARD).option_set("cpu")
    assert menu.within(4 * GIB) is not None
    worked_out = [offer for offer in menu.lazy_options if "option" in vars(offer)]
    assert 0 < len(worked_out) < len(menu.lazy_options) / 2
