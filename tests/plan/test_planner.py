"""make_plan: never over budget, never slower with more, the best there is; whatever the footprint."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.plan.component_cost import SEGMENT
from tightfit.plan.planner import make_plan
from tightfit.schema.footprint import (
    BlockUse,
    Component,
    ComponentCall,
    Footprint,
    Phase,
    StripProfile,
    StripStageProfile,
    Variant,
    WeightBlock,
)
from tightfit.schema.machine import GROUP_SPARE, Accelerator, Budget, KernelGroup, LayerWork, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.units import format_bytes

MIB = 2**20
GIB = 2**30
CARD = Accelerator(
    name="cuda:0", kind="cuda", bytes=80 * GIB, arithmetic_rates={"float16": 1e13}, memory_rate=5e11, link_rate=1e10,
    launch_overhead=1e-5,
)  # fmt: skip
TAKEN = 500 * MIB
CPU = Accelerator(
    name="cpu", kind="cpu", bytes=64 * GIB, free=60 * GIB, arithmetic_rates={"float32": 2e11}, memory_rate=2e10,
    launch_overhead=1e-5,
)  # fmt: skip
HERE = Machine(accelerators=(CARD,), ram=64 * GIB, cores=8, pinnable=64 * GIB, disk_rate=2e9)
RATES = {"disk": 2e9}

CPU_ALONE = Machine(accelerators=(CPU,), ram=64 * GIB, ram_used=TAKEN, cores=8, disk_rate=2e9)


def workload(operations: int) -> KernelGroup:
    return KernelGroup(kind="matmul", dtype="float16", operations=operations, traffic=operations // 100, kernels=3)


def component(name: str, role: Any, sizes: list[int], small: int, per_block: int = 1) -> Component:
    """Layers of so many bytes, so many of them in each block."""
    layers = tuple(
        WeightBlock(name=f"blocks.{i // per_block}.linear{i % per_block or ''}", bytes=size, dtypes={"float16": size})
        for i, size in enumerate(sizes)
    )
    blocks = [sum(sizes[i : i + per_block]) for i in range(0, len(sizes), per_block)]
    units = tuple(
        WeightBlock(name=f"blocks.{i}", bytes=size, dtypes={"float16": size}) for i, size in enumerate(blocks)
    )
    whole = sum(sizes) + small
    left = (WeightBlock(name="", bytes=small, dtypes={"float16": small}),)
    return Component(
        name=name, class_name="Network", role=role, bytes=whole, dtypes={"float16": whole}, blocks=(*units, *left),
        layers=layers, small_tensors=3,
    )  # fmt: skip


def passes_of(of: Component, work: list[int], runs: int, peak: int, method: str = "forward") -> ComponentCall:
    turns = [LayerWork(layer=layer.name, work=(workload(o),)) for layer, o in zip(of.layers, work, strict=True)]
    blocks = itertools.groupby(turns, lambda turn: turn.layer.rpartition(".")[0])
    uses = tuple(
        BlockUse(block=block, live_bytes_at_start=0, peak=peak, layer_work=tuple(own)) for block, own in blocks
    )
    return ComponentCall(component=of.name, method=method, runs=runs, peak=peak, block_uses=uses)


def phase(name: str, done: ComponentCall, room: int, ways: tuple[StripProfile, ...] = ()) -> Phase:
    return Phase(
        name=name, peak=done.peak, allocator_bytes=room, calls=(done,), call_order=(0,) * done.runs, strip_options=ways
    )


def legs_of(done: ComponentCall, strips: int, kernels: int, moved: int = 0) -> tuple[StripStageProfile, ...]:
    """The work of a pass in so many strips, with so many kernels; `moved` bytes of maps wait in host memory."""
    turns = [turn for use in done.block_uses for turn in use.layer_work]
    many = {"kernels": max(kernels // len(turns), 1)}
    turns = [turn.model_copy(update={"work": (turn.work[0].model_copy(update=many),)}) for turn in turns]
    once, half = tuple(turns[:1]), len(turns) // 2 + 1
    ahead, runs = strips > 4, tuple(strips - number % strips for number, _ in enumerate(turns[half:]))
    return (
        StripStageProfile(
            strips=strips,
            prefetches=ahead,
            before_strips=once,
            layer_work=tuple(turns[1:half]),
            strip_counts=(strips,) * len(turns[1:half]),
            strip_ends=(strips,) * len(turns[1:half]),
            copies=strips,
            bytes_out=moved,
        ),
        StripStageProfile(
            strips=strips,
            prefetches=ahead,
            layer_work=tuple(turns[half:]),
            strip_counts=runs,
            strip_ends=tuple(strips if number % 3 else count for number, count in enumerate(runs)),
            copies=strips,
            bytes_in=moved,
        ),
    )


@st.composite
def variants(draw: st.DrawFn, part: Component, work: list[int], runs: int, room: int) -> tuple[Variant, ...]:
    """Up to two ways in which the denoiser `part` could need fewer bytes, in half the work at a time or not."""
    found = []
    for number in range(draw(st.integers(0, 2))):
        less, by_blocks = room // draw(st.integers(2, 8)), draw(st.booleans())
        halves = draw(st.booleans())
        done = passes_of(part, [o // 2 for o in work] if halves else work, runs, less)
        if halves and by_blocks:  # each block twice
            uses = tuple(use.model_copy(update={"layer_work": use.layer_work * 2}) for use in done.block_uses)
            done = done.model_copy(update={"block_uses": uses})
        elif halves:
            done = done.model_copy(update={"runs": 2 * runs})
        found.append(
            Variant(
                cfg="sequential" if halves else None, ffn_chunk=None if halves and not number else 2**20 + number,
                by_blocks=halves and by_blocks, phases=(phase("denoise", done, less),),
            )
        )  # fmt: skip
    return tuple(found)


sizes = st.lists(st.integers(MIB, 400 * MIB), min_size=1, max_size=6)
rooms = st.integers(MIB, 2 * GIB)


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    parts, phases, others = [], [], tuple[Variant, ...]()
    roles = (("text_encoder", "encoder", "encode"), ("unet", "denoiser", "denoise"), ("vae", "autoencoder", "decode"))
    for name, role, segment in roles:
        part = component(name, role, draw(sizes), draw(st.integers(0, 4 * MIB)), draw(st.integers(1, 3)))
        work = [draw(st.integers(10**6, 10**12)) for _ in part.layers]
        room = draw(rooms)
        done = passes_of(part, work, draw(st.integers(1, 8)) if role == "denoiser" else 1, room)
        others = draw(variants(part, work, done.runs, room)) if role == "denoiser" else others
        ways = tuple(
            StripProfile(
                strip_bytes=room // share,
                feature_maps=maps,
                allocator_bytes=room // share + room // 8 * (maps == "device"),
                host_bytes=room // 2,
                stages=legs_of(done, share, 100 * share, room * (maps == "host")),
            )
            for share in (4, 16)
            for maps in ("device", "host")
            if role == "autoencoder" and room > 64
        )
        parts.append(part)
        phases.append(phase(segment, done, room, ways))
    return Footprint(
        pipeline="Tried", components=tuple(parts), request=Request(height=64), phases=tuple(phases), variants=others
    )


budgets = st.integers(64 * MIB, 6 * GIB)


def planned(
    footprint: Footprint, size: int, ram: int | None = None, allow: tuple[str, ...] = (), machine: Machine = HERE
) -> Plan | None:
    try:
        return make_plan(footprint, machine, Budget(device=size, ram=ram), allow)
    except BudgetTooSmall:
        return None


def seconds(plan: Plan) -> float:
    return sum(phase.seconds for phase in plan.forecast)


def check(footprint: Footprint, one: int, other: int) -> None:
    less, more = (planned(footprint, size) for size in sorted((one, other)))
    for plan, size in ((less, min(one, other)), (more, max(one, other))):
        if plan is not None:
            assert max(phase.peak_bytes for phase in plan.forecast) <= size
            assert plan.lossless
    if less is not None:
        assert more is not None
        assert seconds(more) <= seconds(less) * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(footprints(), budgets, budgets)
def test_more_is_never_slower_and_nothing_is_over_budget(footprint: Footprint, one: int, other: int) -> None:
    check(footprint, one, other)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(footprints(), budgets, budgets)
def test_with_thousands_of_footprints(footprint: Footprint, one: int, other: int) -> None:
    check(footprint, one, other)


@settings(deadline=None, max_examples=25)
@given(footprints(), budgets, st.integers(0, 6 * GIB), st.integers(0, 6 * GIB))
def test_ram_is_kept_to_and_more_of_it_is_never_slower(footprint: Footprint, size: int, one: int, other: int) -> None:
    less, more = (planned(footprint, size, max(ram, 1)) for ram in sorted((one, other)))
    sizes = {part.name: part.bytes for part in footprint.components}
    for plan, ram in ((less, min(one, other)), (more, max(one, other))):
        if plan is not None:
            moving = [n for n, c in plan.components.items() if c.placement != "resident" and c.offload_to == "cpu"]
            assert sum(sizes[name] for name in moving) <= max(ram, 1)
    if less is not None:
        assert more is not None
        assert seconds(more) <= seconds(less) * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(footprints(), budgets, budgets)
def test_on_a_cpu_what_the_process_holds_is_part_of_the_budget(footprint: Footprint, one: int, other: int) -> None:
    less, more = (planned(footprint, size, machine=CPU_ALONE) for size in sorted((one, other)))
    for plan, size in ((less, min(one, other)), (more, max(one, other))):
        if plan is not None:
            assert max(phase.peak_bytes for phase in plan.forecast) + TAKEN <= size
            assert all(part.placement == "resident" or part.offload_to == "disk" for part in plan.components.values())
            assert plan.vae.feature_maps == "device"
    if less is not None:
        assert more is not None
        assert seconds(more) <= seconds(less) * (1 + 1e-9)


def test_on_a_cpu_ram_and_device_are_the_same() -> None:
    unet, vae = component("unet", "denoiser", [300 * MIB] * 4, MIB), component("vae", "autoencoder", [90 * MIB], MIB)
    idle = component("image_encoder", "encoder", [500 * MIB], 3 * MIB)
    footprint = Footprint(
        pipeline="Tried", components=(unet, vae, idle), request=Request(height=64),
        phases=(phase("denoise", passes_of(unet, [10**9] * 4, 4, 40 * MIB), 40 * MIB),),
    )  # fmt: skip
    size = TAKEN + 800 * MIB
    plans = [make_plan(footprint, CPU_ALONE, budget) for budget in (Budget(device=size), Budget(ram=size))]
    assert plans[0].components == plans[1].components
    assert plans[0].components["unet"].placement == "stream"
    assert {plans[0].components[name].offload_to for name in ("unet", "image_encoder")} == {"disk"}
    assert plans[0].expandable_segments
    assert not make_plan(footprint, CPU_ALONE, Budget(ram=8 * GIB)).expandable_segments
    said = " ".join(f"{reason.decision}: {reason.because}" for reason in plans[0].reasons)
    assert "800 MiB are left for the pipeline: this process holds 500 MiB already" in said
    with pytest.raises(BudgetTooSmall, match=r"within 600 MiB, while this process holds 500 MiB .* MiB would do"):
        make_plan(footprint, CPU_ALONE, Budget(ram=600 * MIB))
    free = make_plan(footprint, CPU_ALONE)
    assert {part.placement for part in free.components.values()} == {"resident", "offload"}
    assert "57.5 GiB" in free.reasons[1].decision


def test_a_control_group_keeps_some_of_its_limit_free() -> None:
    unet = component("unet", "denoiser", [300 * MIB] * 4, MIB)
    footprint = Footprint(
        pipeline="Tried", components=(unet,), request=Request(height=64),
        phases=(phase("denoise", passes_of(unet, [10**9] * 4, 4, 40 * MIB), 40 * MIB),),
    )  # fmt: skip

    def within(free: int) -> Machine:
        return CPU_ALONE.model_copy(
            update={"ram_limit": 2 * GIB, "accelerators": (CPU.model_copy(update={"free": free}),)}
        )

    alone = make_plan(footprint, CPU_ALONE, Budget(ram=TAKEN + 800 * MIB))
    shared = make_plan(footprint, within(800 * MIB + GROUP_SPARE), Budget(ram=2 * GIB))
    assert shared.components == alone.components
    with pytest.raises(BudgetTooSmall, match=r"holds 500 MiB and 82 MiB are for others in its control group before"):
        make_plan(footprint, within(18 * MIB + GROUP_SPARE), Budget(ram=600 * MIB))


@settings(deadline=None, max_examples=25)
@given(footprints(), budgets)
def test_what_is_allowed_is_only_done_where_nothing_else_fits(footprint: Footprint, size: int) -> None:
    lossless, lossy = planned(footprint, size), planned(footprint, size, allow=("fp8",))
    assert lossless is None or lossy == lossless
    if lossy is not None:
        assert max(phase.peak_bytes for phase in lossy.forecast) <= size
        assert lossy == planned(footprint, size, allow=("fp8",))


@settings(deadline=None, max_examples=25)
@given(footprints(), st.sampled_from((None, 1, 300 * MIB)), st.sampled_from((HERE, CPU_ALONE)))
def test_what_is_said_to_be_needed_is_enough_and_nothing_less_is(
    footprint: Footprint, ram: int | None, machine: Machine
) -> None:
    ram = None if machine is CPU_ALONE else ram
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, machine, Budget(device=1, ram=ram))
    needed = int(str(error.value.facts["needed_bytes"]))
    plan = planned(footprint, needed, ram, machine=machine)
    assert plan is not None
    peaks = {phase.name: phase.peak_bytes for phase in plan.forecast}
    assert peaks[str(error.value.facts["phase"])] == max(peaks.values())  # others may make use of all of it, too
    assert max(peaks.values()) == needed - (TAKEN if machine is CPU_ALONE else 0)
    assert planned(footprint, needed - SEGMENT, ram, machine=machine) is None


@settings(deadline=None, max_examples=25)
@given(footprints())
def test_more_ram_is_said_to_do_where_it_does(footprint: Footprint) -> None:
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, HERE, Budget(device=1))
    assert error.value.facts["needed_ram"] is None
    size = int(str(error.value.facts["needed_bytes"]))  # with as much RAM as wanted
    if planned(footprint, size, 1) is None:
        with pytest.raises(BudgetTooSmall, match="of RAM would do") as error:
            make_plan(footprint, HERE, Budget(device=size, ram=1))
        needed = int(str(error.value.facts["needed_ram"]))
        assert planned(footprint, size, needed) is not None
        assert planned(footprint, size, needed - 1) is None
        with pytest.raises(BudgetTooSmall) as error:
            make_plan(footprint, HERE, Budget(device=size - SEGMENT, ram=1))
        assert error.value.facts["needed_ram"] is None


def test_who_takes_turns_is_there_together() -> None:
    unet, control = (component(name, "denoiser", [200 * MIB] * 3, 0) for name in ("unet", "controlnet"))
    both = [passes_of(part, [10**9] * 3, 8, 10 * MIB) for part in (control, unet)]
    together = Phase(name="denoise", peak=10 * MIB, allocator_bytes=10 * MIB, calls=tuple(both), call_order=(0, 1) * 8)
    footprint = Footprint(pipeline="Tried", components=(unet, control), phases=(together,))
    plan = make_plan(footprint, HERE, Budget(device=GIB))
    assert max(phase.peak_bytes for phase in plan.forecast) <= GIB
    weights = [part.weight_memory or 600 * MIB for part in plan.components.values()]
    assert sum(weights) < GIB < 1200 * MIB


def test_what_cannot_be_planned_is_refused() -> None:
    part = component("unet", "denoiser", [MIB], 0)
    without = Footprint(pipeline="Tried", components=(part,))
    with pytest.raises(PlanError, match="tells of no call"):
        make_plan(without, HERE, Budget(device=GIB))
    told = without.model_copy(update={"phases": (phase("denoise", passes_of(part, [10**9], 1, MIB), MIB),)})
    with pytest.raises(PlanError, match="unknown technique 'fp9'"):
        make_plan(told, HERE, Budget(device=GIB), ["fp9"])
    with pytest.raises(PlanError, match="there is cuda:0"):
        make_plan(told, HERE, Budget(device=GIB), device="cuda:3")


def test_an_error_says_what_would_do() -> None:
    part = component("unet", "denoiser", [300 * MIB, 310 * MIB], 0)
    footprint = Footprint(
        pipeline="Tried", components=(part,), request=Request(height=64, width=32),
        phases=(phase("denoise", passes_of(part, [10**9] * 2, 4, 100 * MIB), 100 * MIB),),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, HERE, Budget(device=400 * MIB))
    said = str(error.value)
    assert re.match(r"Tried cannot do 32×64 within 400 MiB on the cuda:0: 4\d\d MiB would do, for denoise; ", said)
    assert "allow=fp8" not in said  # to widen the larger one takes more than it is as loaded
    with pytest.raises(BudgetTooSmall, match=r"\d+ MiB would do, for denoise; something"):
        make_plan(footprint, HERE, Budget(device=10 * MIB, ram=1))


def test_where_eight_bits_would_do() -> None:
    """Where layers move together, the ring is narrower by more than one of them takes when it is widened."""
    part = component("unet", "denoiser", [40 * MIB] * 20, 0, per_block=10).model_copy(update={"compiled": True})
    footprint = Footprint(
        pipeline="Tried", components=(part,), request=Request(height=64, width=32),
        phases=(phase("denoise", passes_of(part, [10**9] * 20, 4, 100 * MIB), 100 * MIB),),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall, match="allow=fp8 would do"):
        make_plan(footprint, HERE, Budget(device=500 * MIB))
    plan = make_plan(footprint, HERE, Budget(device=500 * MIB), allow=["fp8"])
    (told,) = plan.forecast
    assert plan.components["unet"].storage == "float8_e4m3fn"
    assert (200 + 100 + 6 * 20) * MIB < told.peak_bytes <= 500 * MIB  # ring, activations, one layer widened


# what else is on a card


def small_call() -> Footprint:
    part = component("unet", "denoiser", [8 * MIB] * 4, MIB)
    done = passes_of(part, [10**9] * 4, 2, 10 * MIB)
    return Footprint(
        pipeline="Pipeline", components=(part,), request=Request(), phases=(phase("denoise", done, 10 * MIB),)
    )


@pytest.mark.parametrize(("free", "left"), [(6 * GIB, 512 * MIB), (20 * GIB, GIB)])
def test_without_a_budget_some_of_a_card_stays_free(free: int, left: int) -> None:
    card = CARD.model_copy(update={"free": free})
    plan = make_plan(small_call(), HERE.model_copy(update={"accelerators": (card,)}))
    (said,) = (reason.decision for reason in plan.reasons if reason.decision.endswith("may be used"))
    assert said == f"{format_bytes(free - left)} may be used"


def test_what_others_take_is_no_part_of_a_budget() -> None:
    alone = make_plan(small_call(), HERE, Budget(device=200 * MIB))
    card = CARD.model_copy(update={"allocated": 100 * MIB})
    here = HERE.model_copy(update={"accelerators": (card,)})
    assert make_plan(small_call(), here, Budget(device=300 * MIB)).forecast == alone.forecast
    with pytest.raises(BudgetTooSmall, match=r"within 150 MiB, of which other tensors of this process take 100 MiB,"):
        make_plan(small_call(), here, Budget(device=150 * MIB))


def test_segments_that_cannot_grow_are_no_decision_but_a_reason() -> None:
    card = CARD.model_copy(update={"expandable_refused": "the driver refuses them"})
    plan = make_plan(small_call(), HERE.model_copy(update={"accelerators": (card,)}), Budget(device=GIB))
    assert make_plan(small_call(), HERE, Budget(device=GIB)).expandable_segments
    assert not plan.expandable_segments
    assert "the driver refuses them" in [reason.because for reason in plan.reasons]
