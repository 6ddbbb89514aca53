"""How few bytes would do is known without working out plans, and is no more than by the leanest of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import CARD, CPU, HERE, MIB, component, passes_of, phase, workload
from tightfit.errors import BudgetTooSmall
from tightfit.plan.options import Task, Where
from tightfit.plan.pace import Pace
from tightfit.plan.parts import SEGMENT, Part
from tightfit.plan.planner import make_plan
from tightfit.plan.sketches import sketches
from tightfit.plan.streaming import Parcels, parcel_sizes
from tightfit.records import (
    Accelerator,
    Budget,
    Component,
    ComponentPlan,
    Footprint,
    Grain,
    Home,
    Pass,
    Request,
    Storage,
    Turn,
    Unit,
    Use,
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
@given(layered(), homes, storages, st.booleans())
def test_what_a_plan_takes_is_known_before_it_is_settled(
    part: Component, home: Home, storage: Storage, by_blocks: bool
) -> None:
    whole = ComponentPlan(placement="per-phase", home=home, storage=storage)
    grains: tuple[Grain, ...] = ("leaf", "block")
    parcels = {grain: Parcels(parcel_sizes(part, grain, whole)) for grain in grains}
    seconds = {leaf.name: 1.0 + 5 * index % 7 for index, leaf in enumerate(part.leaves)}
    for sketch in sketches(part, whole, parcels, 12, by_blocks=by_blocks):
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


def test_compiled_blocks_come_as_a_whole() -> None:
    """However small their layers are: the fewest bytes are those of the largest block, and are enough."""
    leaves = tuple(
        Unit(name=f"blocks.{block}.{layer}", bytes=50 * MIB, dtypes={"float16": 50 * MIB})
        for block in range(4) for layer in range(3)
    )  # fmt: skip
    units = [Unit(name=f"blocks.{block}", bytes=150 * MIB, dtypes={"float16": 150 * MIB}) for block in range(4)]
    part = Component(
        name="unet", class_name="Network", role="denoiser", bytes=600 * MIB, dtypes={"float16": 600 * MIB},
        units=(*units, Unit(name="", bytes=0, dtypes={})), leaves=leaves, small=0, compiled=True,
    )  # fmt: skip
    uses = tuple(
        Use(
            unit=unit.name, waiting=0, peak=MIB,
            turns=tuple(Turn(leaf=leaf.name, work=(workload(10**9),)) for leaf in leaves if unit.name in leaf.name),
        )
        for unit in units
    )  # fmt: skip
    footprint = called(part, Pass(component="unet", method="forward", runs=4, peak=MIB, uses=uses))
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, HERE, Budget(device=100 * MIB))
    needed = int(str(error.value.facts["needed_bytes"]))
    assert 150 * MIB < needed < 250 * MIB
    plan = make_plan(footprint, HERE, Budget(device=needed))
    assert plan.components["unet"].grain == "block"
    assert any("its blocks come one after another" in reason.because for reason in plan.reasons)
    with pytest.raises(BudgetTooSmall):
        make_plan(footprint, HERE, Budget(device=needed - SEGMENT))
