"""A menu works out few options, and gives the same as if it had worked out all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import CARD, CPU, GIB, MIB, budgets, component, footprints, passes_of, phase
from tightfit.plan.options import Menu, Option, Task, Where
from tightfit.records import Accelerator, Footprint


def fastest(menu: Menu, size: int) -> Option | None:
    fitting = [option for option in menu if option.comes <= size]
    return min(fitting, key=lambda option: (option.seconds, option.comes), default=None)


@settings(deadline=None, max_examples=100)
@given(
    footprints(), st.sampled_from((CARD, CPU)), st.sampled_from(("resident", "host", "disk")),
    st.lists(budgets, min_size=1, max_size=8),
)  # fmt: skip
def test_few_are_worked_out(footprint: Footprint, device: Accelerator, where: Where, sizes: list[int]) -> None:
    """And none takes less than was said before it was worked out."""
    for part in footprint.components:
        menu, all_of_it = (Task(part, footprint, device).menu(where, 2e9) for _ in range(2))
        for size in sizes:
            soonest, found, best = menu.soonest(size), menu.within(size), fastest(all_of_it, size)
            assert (found and found.seconds) == (best and pytest.approx(best.seconds, rel=1e-10))
            assert found is None or (soonest is not None and soonest <= found.seconds)
        for offer in all_of_it.offers:
            assert offer.seconds <= offer.option.seconds
            assert offer.comes <= offer.option.comes


def test_it_is_lazy() -> None:
    """Where all fits, hardly anything is looked at."""
    part = component("unet", "denoiser", [100 * MIB] * 12, MIB)
    done = passes_of(part, [10**12] * 12, 8, MIB)
    footprint = Footprint(pipeline="Tried", components=(part,), phases=(phase("denoise", done, MIB),))
    menu = Task(part, footprint, CARD).menu("host")
    assert menu.within(4 * GIB) is not None
    worked_out = [offer for offer in menu.offers if "option" in vars(offer)]
    assert 0 < len(worked_out) < len(menu.offers) / 2
