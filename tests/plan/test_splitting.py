"""Networks that are split over devices: which parts they have, what is predicted of them, and when they are planned."""

from __future__ import annotations

import pytest

from plan.test_planner import CARD, GIB, MIB, RATES
from plan.test_team import BOTH, DEVICES, OTHER, planned
from tightfit.errors import PlanError
from tightfit.plan.forecast import add_joint_forecast, simulate_jointly
from tightfit.plan.network_parts import block_order, check_split, part_finder, part_of, resolve_parts
from tightfit.schema.footprint import BlockUse, Component, ComponentCall, Footprint, Phase, WeightBlock
from tightfit.schema.machine import KernelGroup, LayerWork
from tightfit.schema.plan import ComponentPlan, NetworkPart, Plan
from tightfit.schema.request import Request

BLOCKS, SIZE, INPUT = 10, 300 * MIB, 8 * MIB  # of a denoiser larger than a card of 2 GiB


def denoiser(blocks: int = BLOCKS) -> Component:
    names = [f"blocks.{index}" for index in range(blocks)]
    layers = tuple(WeightBlock(name=f"{name}.linear", bytes=SIZE) for name in names)
    parts = (*(WeightBlock(name=name, bytes=SIZE) for name in names), WeightBlock(name="", bytes=MIB))
    return Component(
        name="transformer", class_name="T", role="denoiser", bytes=blocks * SIZE + MIB,
        dtypes={"float16": blocks * SIZE}, blocks=parts, layers=layers, small_tensors=2,
    )  # fmt: skip


def uses(blocks: int = BLOCKS) -> tuple[BlockUse, ...]:
    work = (KernelGroup(kind="matmul", dtype="float16", operations=10**9, traffic=MIB, kernels=1),)
    return tuple(
        BlockUse(
            block=f"blocks.{index}", live_bytes_at_start=2 * INPUT, peak=4 * INPUT,
            layer_work=(LayerWork(layer=f"blocks.{index}.linear", work=work),),
        )
        for index in range(blocks)
    )  # fmt: skip


def footprint_of(blocks: int = BLOCKS) -> Footprint:
    first = BlockUse(block="", live_bytes_at_start=INPUT, peak=3 * INPUT, layer_work=())
    last = BlockUse(block="", live_bytes_at_start=2 * INPUT, peak=3 * INPUT, layer_work=())
    call = ComponentCall(
        component="transformer", method="forward", runs=4, peak=4 * INPUT, block_uses=(first, *uses(blocks), last)
    )
    phase = Phase(name="denoise", peak=4 * INPUT, allocator_bytes=5 * INPUT, calls=(call,), call_order=(0,) * 4)
    request = Request(height=64, width=64, steps=4)
    return Footprint(pipeline="P", components=(denoiser(blocks),), request=request, phases=(phase,))


def split_at(first: str, **fields: object) -> ComponentPlan:
    return ComponentPlan.from_mapping({"split": {OTHER.name: first}, **fields})


def test_the_middle_of_a_unet_is_before_its_late_blocks() -> None:
    defined = ["down_blocks.0", "down_blocks.1", "up_blocks.0", "up_blocks.1", ""]
    assert block_order(defined, has_skips=True) == [
        "down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1",
    ]  # fmt: skip
    assert block_order(defined, has_skips=False) == defined[:-1]


def test_a_module_is_in_the_part_of_its_block_and_all_else_in_the_first() -> None:
    order = ["in_blocks.0", "blocks.0", "blocks.1", "blocks.10"]
    find = part_finder(order, [NetworkPart(first="blocks.1")])
    paths = ["", "proj_out", "blocks", "blocks.0.linear", "blocks.1", "blocks.1.attn.to_q", "blocks.10.ff", "blocks.11"]
    assert [find(path) for path in paths] == [0, 0, 0, 0, 1, 1, 1, 0]


def test_parts_have_all_bytes_and_layers_of_a_component_once() -> None:
    whole, chosen = denoiser(), split_at("blocks.4")
    parts = [part_of(whole, chosen, index) for index in (0, 1)]
    assert sum(part.bytes for part in parts) == whole.bytes
    assert tuple(layer for part in parts for layer in part.layers) == whole.layers
    assert [len(part.layers) for part in parts] == [4, 6]


def test_streaming_of_each_part_is_resolved_by_itself() -> None:
    whole = denoiser()
    both = split_at("blocks.4", placement="stream", weight_memory=5 * SIZE + MIB)
    resolved = resolve_parts(whole, both)
    own, other = resolved.parts(CARD.name).values()
    assert own.resident_layers == tuple(f"blocks.{index}.linear" for index in range(4))
    assert other.resident_layers is not None
    assert 0 < len(other.resident_layers) < 6
    assert all(name.split(".")[1] in "456789" for name in other.resident_layers)
    assert resolve_parts(whole, resolved) == resolved
    every = tuple(f"blocks.{index}.linear" for index in range(1, 9))
    named = resolve_parts(whole, split_at("blocks.4", placement="stream", resident_layers=every))
    assert [len(part.resident_layers or ()) for part in named.parts(CARD.name).values()] == [3, 5]


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({OTHER.name: "block.3"}, "unknown block of transformer 'block.3': did you mean 'blocks.3'"),
        ({OTHER.name: "blocks.0"}, "leaves no block before the part on cuda:1"),
        ({OTHER.name: "blocks.5", "cuda:2": "blocks.5"}, "runs blocks.5 before blocks.5"),
    ],
)
def test_what_is_no_split_is_refused(split: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_split(denoiser(), ComponentPlan.from_mapping({"split": split}))


def test_a_forecast_has_each_part_on_its_device() -> None:
    footprint = footprint_of()
    together = Plan(device=CARD.name, components={"transformer": ComponentPlan()})
    apart = Plan(device=CARD.name, components={"transformer": split_at("blocks.4")})
    (whole,) = simulate_jointly(footprint, together, DEVICES, RATES)
    (parts,) = simulate_jointly(footprint, apart, DEVICES, RATES)
    assert sum(part.weights for part in parts.values()) == whole[CARD.name].weights
    assert parts[OTHER.name].weights == 6 * SIZE
    assert parts[CARD.name].allocator_bytes == whole[CARD.name].allocator_bytes
    assert parts[OTHER.name].allocator_bytes == 5 * INPUT - INPUT  # without what is live before the call
    # 8 MiB there and 8 MiB back, out of one card and into the other, four times
    link = CARD.link_rate or 0
    crossing = 4 * 2 * INPUT * (1 / link + 1 / (CARD.link_rate_out or link))
    seconds = sum(part.seconds for part in parts.values()) - whole[CARD.name].seconds
    assert seconds == pytest.approx(crossing, rel=1e-6)


def test_a_network_larger_than_a_card_is_split_where_that_is_faster() -> None:
    footprint = footprint_of()
    plan = planned(footprint, 2 * GIB, 2 * GIB)
    assert plan is not None
    chosen = plan.components["transformer"]
    assert list(chosen.split) == [OTHER.name]
    assert [part.placement for part in plan.parts_of("transformer").values()] == ["resident", "resident"]
    assert any(reason.decision.startswith("transformer is split: blocks from ") for reason in plan.reasons)
    told = add_joint_forecast(footprint, plan, DEVICES).forecast
    assert [phase.peak_bytes for phase in told] == [phase.peak_bytes for phase in plan.forecast]
    for phase in plan.forecast:
        assert phase.peak_bytes <= 2 * GIB
        assert phase.other_devices[OTHER.name] <= 2 * GIB


def test_a_network_that_fits_one_card_is_not_split() -> None:
    plan = planned(footprint_of(), 4 * GIB, 4 * GIB)
    assert plan is not None
    assert plan.devices == (CARD.name,)


def test_cards_too_small_for_all_of_it_stream_its_parts() -> None:
    plan = planned(footprint_of(), GIB, GIB)
    assert plan is not None
    parts: dict[str, NetworkPart] = plan.components["transformer"].split
    assert parts
    assert {part.placement for part in plan.parts_of("transformer").values()} == {"stream"}
    assert BOTH.accelerators[1].name in parts
