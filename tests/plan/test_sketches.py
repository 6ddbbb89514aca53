"""How few bytes would do is known without working out plans, and is no more than by the leanest of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import CARD, CPU, HERE, MIB, component, passes_of, phase, workload
from tightfit.errors import BudgetTooSmall
from tightfit.plan.candidates import candidates
from tightfit.plan.component_cost import SEGMENT, ComponentCost
from tightfit.plan.cost_model import CostModel
from tightfit.plan.layer_selection import WeightGroupSizes, weight_group_sizes
from tightfit.plan.options import ComponentWorkload, WeightLocation
from tightfit.plan.planner import make_plan
from tightfit.schema.footprint import BlockUse, Component, ComponentCall, Footprint, Variant, WeightBlock
from tightfit.schema.machine import Accelerator, Budget, LayerWork
from tightfit.schema.plan import ComponentPlan, Granularity, Storage
from tightfit.schema.request import Request

DONE = phase("denoise", passes_of(component("unet", "denoiser", [MIB], 0), [1], 1, 1), 1)
VARIANTS = (
    Variant(ffn_chunk=MIB, phases=(DONE,)),
    Variant(cfg="sequential", phases=(DONE,)),
    Variant(cfg="sequential", by_blocks=True, phases=(DONE,)),
)
stores = st.sampled_from(("cpu", "disk"))
storages = st.sampled_from(("as-loaded", "int8", "float8_e4m3fn"))


@st.composite
def layered(draw: st.DrawFn) -> Component:
    """A few layers or many, alike or not, and some that are far larger than the others."""
    most = draw(st.sampled_from((20 * 1024, MIB, 3 * MIB, 40 * MIB)))
    alike = st.sampled_from(draw(st.lists(st.integers(1, most), min_size=1, max_size=3)))
    sizes = draw(st.lists(alike | st.integers(1, most), max_size=draw(st.sampled_from((6, 60)))))
    giants = draw(st.lists(st.integers(most, 6 * most), max_size=4))
    return component("unet", "denoiser", draw(st.permutations(sizes + giants)), draw(st.integers(1, 3 * MIB)))


def called(part: Component, done: ComponentCall) -> Footprint:
    return Footprint(
        pipeline="T", components=(part,), request=Request(height=64), phases=(phase("denoise", done, MIB),)
    )


@settings(deadline=None, max_examples=100)
@given(layered(), stores, storages, st.booleans())
def test_what_a_plan_takes_is_known_before_it_is_settled(
    part: Component, store: str, storage: Storage, by_blocks: bool
) -> None:
    whole = ComponentPlan(placement="offload", offload_to=store, storage=storage)
    granularities: tuple[Granularity, ...] = ("layer", "block")
    groups = {
        granularity: WeightGroupSizes(weight_group_sizes(part, granularity, whole)) for granularity in granularities
    }
    seconds = {leaf.name: 1.0 + 5 * index % 7 for index, leaf in enumerate(part.layers)}
    for sketch in candidates(part, whole, groups, 12, by_blocks=by_blocks):
        settled = ComponentCost(
            part, sketch.plan_by_times(seconds), CPU, CostModel(part, CPU), seconds=seconds
        )  # what is small is always there
        assert (
            sketch.streamed_bytes == settled.streamed_bytes
            if sketch.exact
            else sketch.streamed_bytes <= settled.streamed_bytes
        )


@settings(deadline=None, max_examples=50)
@given(
    layered(), st.sampled_from((CARD, CPU)), st.just("resident") | stores, storages,
    st.sampled_from((None, *VARIANTS)),
)  # fmt: skip
def test_no_plan_takes_less_than_the_fewest(
    part: Component, device: Accelerator, where: WeightLocation, storage: Storage, variant: Variant | None
) -> None:
    work = [10**9 * (1 + 5 * index % 7) for index in range(len(part.layers))]
    footprint = called(part, passes_of(part, work, 4, MIB))
    menu = ComponentWorkload(part, footprint, device).option_set(where, {"disk": 2e9}, storage, variant)
    comes = [offer.cost.streamed_bytes for offer in menu.lazy_options]
    assert ComponentWorkload(part, footprint, device).min_bytes(where, storage, variant) == min(comes, default=None)


def test_compiled_blocks_come_as_a_whole() -> None:
    """However small their layers are: the fewest bytes are those of the largest block, and are enough."""
    layers = tuple(
        WeightBlock(name=f"blocks.{block}.{layer}", bytes=50 * MIB, dtypes={"float16": 50 * MIB})
        for block in range(4) for layer in range(3)
    )  # fmt: skip
    blocks = [WeightBlock(name=f"blocks.{block}", bytes=150 * MIB, dtypes={"float16": 150 * MIB}) for block in range(4)]
    part = Component(
        name="unet", class_name="Network", role="denoiser", bytes=600 * MIB, dtypes={"float16": 600 * MIB},
        blocks=(*blocks, WeightBlock(name="", bytes=0, dtypes={})), layers=layers, small_tensors=0, compiled=True,
    )  # fmt: skip
    uses = tuple(
        BlockUse(
            block=unit.name,
            live_bytes_at_start=0,
            peak=MIB,
            layer_work=tuple(
                LayerWork(layer=leaf.name, work=(workload(10**9),)) for leaf in layers if unit.name in leaf.name
            ),
        )
        for unit in blocks
    )
    footprint = called(part, ComponentCall(component="unet", method="forward", runs=4, peak=MIB, block_uses=uses))
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, HERE, Budget(device=100 * MIB))
    needed = int(str(error.value.facts["needed_bytes"]))
    assert 150 * MIB < needed < 250 * MIB
    plan = make_plan(footprint, HERE, Budget(device=needed))
    assert plan.components["unet"].granularity == "block"
    assert any("no resident blocks, others loaded up to" in reason.because for reason in plan.reasons)
    with pytest.raises(BudgetTooSmall):
        make_plan(footprint, HERE, Budget(device=needed - SEGMENT))
