"""Split networks whose parts work at the same time: what that saves, and when it is planned."""

from __future__ import annotations

from typing import Any

import pytest

from plan.test_planner import CARD, GIB, MIB, RATES
from plan.test_splitting import INPUT, denoiser
from plan.test_team import BOTH, DEVICES, OTHER, planned
from tightfit.plan.forecast import add_joint_forecast, simulate_jointly
from tightfit.plan.overlap import OverlappedParts
from tightfit.schema.footprint import BlockUse, ComponentCall, Footprint, Phase, Variant
from tightfit.schema.machine import Accelerator, KernelGroup, LayerWork
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.request import Request

BLOCKS, STEPS, OPERATIONS = 10, 8, 10**12
AFTER = ("norm_out", "proj_out")


def uses(chunks: int, kernels: int) -> list[BlockUse]:
    """Block uses of a call in `chunks`, each between code outside of blocks."""
    outside = BlockUse(block="", live_bytes_at_start=2 * INPUT, peak=3 * INPUT, layer_work=())
    group = KernelGroup(kind="matmul", dtype="float16", operations=OPERATIONS // chunks, traffic=MIB, kernels=kernels)
    blocks = [
        BlockUse(
            block=f"blocks.{index}", live_bytes_at_start=2 * INPUT, peak=4 * INPUT,
            layer_work=(LayerWork(layer=f"blocks.{index}.linear", work=(group,)),),
        )
        for index in range(BLOCKS)
    ]  # fmt: skip
    return [outside.model_copy(update={"live_bytes_at_start": INPUT}), *blocks, outside] * chunks


def footprint_of(
    *, kernels: int = 1, after: tuple[str, ...] = AFTER, chunks: int = 2, paired: bool = False
) -> Footprint:
    runs = 2 * STEPS if paired else STEPS

    def phase(count: int) -> Phase:
        call = ComponentCall(
            component="transformer", method="forward", runs=runs, peak=4 * INPUT // count, paired=paired,
            block_uses=tuple(uses(count, kernels)), after_blocks=after if count == 1 else (),
        )  # fmt: skip
        allocator_bytes = 5 * INPUT // count
        return Phase(
            name="denoise", peak=4 * INPUT // count, allocator_bytes=allocator_bytes, calls=(call,),
            call_order=(0,) * runs,
        )  # fmt: skip

    fields: dict[str, Any] = {"cfg": "sequential"} if chunks == 2 else {"max_batch": 1}
    variants = () if paired else (Variant(**fields, phases=(phase(chunks),)),)
    request = Request(height=64, width=64, steps=STEPS, batch=max(chunks // 2, 1))
    return Footprint(
        pipeline="P", components=(denoiser(BLOCKS),), request=request, phases=(phase(1),), variants=variants
    )


def plan_of(first: str, **fields: Any) -> Plan:
    part = {"first": first, "outside": list(AFTER)}
    chosen = ComponentPlan.from_mapping({"split": {OTHER.name: part}, **fields})
    return Plan(device=CARD.name, components={"transformer": chosen})


def forecast_seconds(footprint: Footprint, plan: Plan, devices: dict[str, Accelerator] = DEVICES) -> float:
    return sum(phase.seconds for phase in add_joint_forecast(footprint, plan, devices, RATES).forecast)


@pytest.mark.parametrize(("chunks", "fields"), [(2, {"cfg": "sequential"}), (4, {"max_batch": 1})])
@pytest.mark.parametrize("place", [2, 5, 7])
def test_a_chunk_is_in_each_part_at_once(chunks: int, fields: dict[str, Any], place: int) -> None:
    footprint, plan = footprint_of(chunks=chunks), plan_of(f"blocks.{place}", **fields)
    (estimates,) = simulate_jointly(footprint, plan, DEVICES, RATES)
    one, other = (estimate.seconds for estimate in estimates.values())
    expected = (one + other + (chunks - 1) * max(one, other)) / chunks
    assert forecast_seconds(footprint, plan) == pytest.approx(expected)
    # without what runs after the blocks on the last card, or without chunks, parts take turns
    turns = ComponentPlan.from_mapping({"split": {OTHER.name: f"blocks.{place}"}, **fields})
    in_turn = forecast_seconds(footprint, plan.model_copy(update={"components": {"transformer": turns}}))
    assert in_turn == pytest.approx(one + other, rel=0.01)


def test_nothing_is_saved_where_the_host_launches_for_longer_than_the_cards_compute() -> None:
    plan = plan_of("blocks.5", cfg="sequential")
    usual, busy = footprint_of(), footprint_of(kernels=20_000)
    slow = {name: device.model_copy(update={"launch_overhead": 1e-5}) for name, device in DEVICES.items()}
    (estimates,) = simulate_jointly(busy, plan, slow, RATES)
    in_turn = sum(each.seconds for each in estimates.values())
    assert forecast_seconds(busy, plan, slow) == pytest.approx(in_turn, rel=0.01)
    (estimates,) = simulate_jointly(usual, plan, slow, RATES)
    assert forecast_seconds(usual, plan, slow) < 0.8 * sum(each.seconds for each in estimates.values())


@pytest.mark.parametrize("launching", [2.5, 3.0, 100.0])
def test_launches_take_as_long_as_they_take_but_lose_nothing(launching: float) -> None:
    parts = OverlappedParts(("one", "other"), 2, launching)
    assert parts.seconds_saved({"one": 2.0, "other": 1.0}) == max(3.0 - launching, 0.0)
    assert parts.seconds_saved({"one": 2.0}) == 0.0  # a phase in which it does not run


def test_what_crosses_of_earlier_chunks_counts_on_the_first_card() -> None:
    footprint = footprint_of(chunks=4)
    (apart,) = simulate_jointly(footprint, plan_of("blocks.5", max_batch=1), DEVICES, RATES)
    chosen = ComponentPlan.from_mapping({"split": {OTHER.name: "blocks.5"}, "max_batch": 1})
    turns = Plan(device=CARD.name, components={"transformer": chosen})
    (in_turn,) = simulate_jointly(footprint, turns, DEVICES, RATES)
    more = apart[CARD.name].allocator_bytes - in_turn[CARD.name].allocator_bytes
    assert more == 3 * INPUT  # INPUT bytes of each of three chunks, while the fourth is computed


def test_a_denoiser_that_fits_one_card_is_split_where_both_then_work() -> None:
    footprint = footprint_of()
    plan = planned(footprint, 8 * GIB, 8 * GIB)
    assert plan is not None
    chosen = plan.components["transformer"]
    assert {name: part.first for name, part in chosen.split.items()} == {OTHER.name: "blocks.5"}
    assert chosen.split[OTHER.name].outside == AFTER
    assert chosen.cfg == "sequential"
    assert {part.placement for part in plan.parts_of("transformer").values()} <= {"resident", "offload"}
    alone = planned(footprint.model_copy(update={"variants": ()}), 8 * GIB, 8 * GIB)
    assert alone is not None
    seconds = [sum(phase.seconds for phase in each.forecast) for each in (plan, alone)]
    assert seconds[0] == pytest.approx(0.75 * seconds[1], rel=0.02)
    assert forecast_seconds(footprint, plan) == pytest.approx(seconds[0])
    (reason,) = (reason for reason in plan.reasons if "is split" in reason.decision)
    assert reason.decision == (
        "transformer is split, with half of a batch at a time: blocks from blocks.5 on compute on cuda:1"
    )
    assert reason.because.startswith("the parts then work at the same time, which makes the call ")


@pytest.mark.parametrize(
    "footprint", [footprint_of(after=()), footprint_of(kernels=200_000)], ids=["tail on the first card", "host-bound"]
)
def test_it_is_not_split_where_that_gains_nothing(footprint: Footprint) -> None:
    plan = planned(footprint, 8 * GIB, 8 * GIB)
    assert plan is not None
    assert not plan.components["transformer"].split


def test_a_faster_card_has_more_of_the_blocks() -> None:
    fast = OTHER.model_copy(update={"arithmetic_rates": {"float16": 3 * CARD.arithmetic_rates["float16"]}})
    machine = BOTH.model_copy(update={"accelerators": (CARD, fast)})
    plan = planned(footprint_of(chunks=8), 8 * GIB, 8 * GIB, machine=machine)
    assert plan is not None
    (first,) = (int(part.first.split(".")[1]) for part in plan.components["transformer"].split.values())
    assert first == (2 if plan.device == CARD.name else 8)


def test_the_two_calls_of_a_step_are_in_both_parts_at_once() -> None:
    """All but the first step's, which are made once in turn and once together."""
    footprint = footprint_of(paired=True)
    plan = planned(footprint, 8 * GIB, 8 * GIB)
    assert plan is not None
    chosen = plan.components["transformer"]
    assert (chosen.cfg, chosen.max_batch) == ("batched", 1)
    (estimates,) = simulate_jointly(footprint, plan, DEVICES, RATES)
    one, other = (estimate.seconds for estimate in estimates.values())
    expected = (one + other + max(one, other)) / 2 + (one + other) / STEPS
    assert forecast_seconds(footprint, plan) == pytest.approx(expected)
    assert any(", with the two calls of a step as one, in halves: " in reason.decision for reason in plan.reasons)
    turns = footprint.model_copy(update={"phases": tuple(unpaired(phase) for phase in footprint.phases)})
    alone = planned(turns, 8 * GIB, 8 * GIB)
    assert alone is not None
    assert not alone.components["transformer"].split


def unpaired(phase: Phase) -> Phase:
    return phase.model_copy(update={"calls": tuple(each.model_copy(update={"paired": False}) for each in phase.calls)})
