"""How few bytes would do is known without working out plans, and is no more than by the leanest of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import CARD, CPU, MIB, component, passes_of, phase
from tightfit.plan.options import Task, Where
from tightfit.plan.pace import Pace
from tightfit.plan.parts import Part
from tightfit.plan.sketches import sketches
from tightfit.plan.streaming import Parcels, parcel_sizes
from tightfit.records import (
    Accelerator,
    Component,
    ComponentPlan,
    Footprint,
    Grain,
    Home,
    Pass,
    Request,
    Storage,
    Variant,
)

DONE = phase("denoise", passes_of(component("unet", "denoiser", [MIB], 0), [1], 1, 1), 1)
VARIANTS = (
    Variant(feed_forward=MIB, phases=(DONE,)),
    Variant(guidance="apart", phases=(DONE,)),
    Variant(guidance="apart", by_blocks=True, phases=(DONE,)),
)
homes = st.sampled_from(("host", "disk"))
storages = st.sampled_from(("as-loaded", "int8", "float8_e4m3fn"))


@st.composite
def layered(draw: st.DrawFn) -> Component:
    """A few layers or many, alike or not, and some that are far larger than the others."""
    most = draw(st.sampled_from((20 * 1024, MIB, 3 * MIB, 40 * MIB)))
    alike = st.sampled_from(draw(st.lists(st.integers(1, most), min_size=1, max_size=3)))
    sizes = draw(st.lists(alike | st.integers(1, most), max_size=draw(st.sampled_from((6, 60)))))
    giants = draw(st.lists(st.integers(most, 6 * most), max_size=4))
    return component("unet", "denoiser", draw(st.permutations(sizes + giants)), draw(st.integers(1, 3 * MIB)))


def called(part: Component, done: Pass) -> Footprint:
    return Footprint(
        pipeline="T", components=(part,), request=Request(height=64), phases=(phase("denoise", done, MIB),)
    )


@settings(deadline=None, max_examples=100)
@given(layered(), homes, storages)
def test_what_a_plan_takes_is_known_before_it_is_settled(part: Component, home: Home, storage: Storage) -> None:
    whole = ComponentPlan(placement="per-phase", home=home, storage=storage)
    grains: tuple[Grain, ...] = ("leaf", "block")
    parcels = {grain: Parcels(parcel_sizes(part, grain, whole)) for grain in grains}
    seconds = {leaf.name: 1.0 + 5 * index % 7 for index, leaf in enumerate(part.leaves)}
    for sketch in sketches(part, whole, parcels, 12):
        settled = Part(
            part, sketch.plan(seconds), CPU, Pace(part, CPU), seconds=seconds
        )  # what is small is always there
        assert sketch.comes == settled.comes if sketch.exact else sketch.comes <= settled.comes


@settings(deadline=None, max_examples=50)
@given(
    layered(), st.sampled_from((CARD, CPU)), st.just("resident") | homes, storages,
    st.sampled_from((None, *VARIANTS)),
)  # fmt: skip
def test_no_plan_takes_less_than_the_fewest(
    part: Component, device: Accelerator, where: Where, storage: Storage, variant: Variant | None
) -> None:
    work = [10**9 * (1 + 5 * index % 7) for index in range(len(part.leaves))]
    footprint = called(part, passes_of(part, work, 4, MIB))
    menu = Task(part, footprint, device).menu(where, 2e9, storage, variant)
    comes = [offer.part.comes for offer in menu.offers]
    assert Task(part, footprint, device).least(where, storage, variant) == min(comes, default=None)
