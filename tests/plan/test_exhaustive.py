"""make_plan beside every plan there is, for small pipelines: nothing is refused that fits, nothing is much faster."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_planner import (
    CARD,
    GIB,
    HERE,
    MIB,
    RATES,
    component,
    legs_of,
    passes_of,
    phase,
    planned,
    seconds,
    variants,
)
from tightfit.errors import BudgetTooSmall
from tightfit.plan.component_cost import SEGMENT
from tightfit.plan.forecast import add_forecast
from tightfit.plan.layer_selection import weight_group_sizes
from tightfit.plan.options import GRANULARITIES
from tightfit.plan.planner import make_plan
from tightfit.schema.footprint import Component, Footprint, StripProfile, Variant
from tightfit.schema.machine import Budget
from tightfit.schema.plan import ComponentPlan, Granularity, Plan, VaePlan
from tightfit.schema.request import Request

WITHIN = 1.03  # times as long as the best


@st.composite
def small_footprints(draw: st.DrawFn) -> Footprint:
    """A denoiser of up to four layers and an autoencoder of up to two, each with up to two other ways to work."""
    parts, phases, others = [], [], tuple[Variant, ...]()
    for name, role, segment, most in (("unet", "denoiser", "denoise", 4), ("vae", "autoencoder", "decode", 2)):
        sizes = draw(st.lists(st.integers(8 * MIB, 400 * MIB), min_size=1, max_size=most))
        part = component(name, role, sizes, draw(st.integers(0, 4 * MIB)), draw(st.integers(1, 2)))
        work = [draw(st.integers(10**6, 2 * 10**12)) for _ in sizes]
        room = draw(st.integers(MIB, GIB))
        runs = draw(st.integers(1, 6)) if role == "denoiser" else 1
        done = passes_of(part, work, runs, room)
        ways = tuple(
            StripProfile(
                strip_bytes=room // share,
                feature_maps="device",
                allocator_bytes=room // 2 + room // share,
                host_bytes=0,
                stages=legs_of(done, share, 300 * share),
            )
            for share in (4, 16)
            if role == "autoencoder" and draw(st.booleans())
        )
        others = draw(variants(part, work, runs, room)) if role == "denoiser" else others
        parts.append(part)
        phases.append(phase(segment, done, room, ways))
    return Footprint(
        pipeline="Tried", components=tuple(parts), request=Request(height=64), phases=tuple(phases), variants=others
    )


def every_plan_of(part: Component) -> Iterator[ComponentPlan]:
    """Resident, there for its phase, and streamed with any layers or blocks staying and a ring for one or more."""
    yield ComponentPlan(placement="resident")
    yield ComponentPlan(placement="offload")
    for granularity in GRANULARITIES:
        sizes = weight_group_sizes(part, granularity, ComponentPlan(placement="stream"))
        if granularity == "layer" or len(sizes) < len(part.layers):
            yield from every_stream_of(sizes, granularity)


def every_stream_of(sizes: Mapping[str, int], granularity: Granularity) -> Iterator[ComponentPlan]:
    for count in range(len(sizes) + 1):
        for resident in itertools.combinations(sizes, count):
            passing = sorted((size for name, size in sizes.items() if name not in resident), reverse=True)
            for ring in {sum(passing[:ahead]) for ahead in range(1, len(passing) + 1)} or {0}:
                yield ComponentPlan(
                    placement="stream", granularity=granularity, resident_layers=resident, ring_buffer=ring
                )


def best_of_all(footprint: Footprint, size: int) -> float | None:
    """Seconds of the fastest of all plans within `size`, whatever variant they are of."""
    found = [best_of(footprint, size), *(best_of(footprint.with_variant(v), size, v) for v in footprint.variants)]
    return min((seconds for seconds in found if seconds is not None), default=None)


def best_of(footprint: Footprint, size: int, variant: Variant | None = None) -> float | None:
    """The same of one. What is done in parts goes by blocks if it streams, and only then."""
    best = None
    ways = [
        VaePlan(),
        *(
            VaePlan(strips=way.strip_bytes, feature_maps=way.feature_maps)
            for phase in footprint.phases
            for way in phase.strip_options
        ),
    ]
    parts = footprint.components
    for chosen in itertools.product(*(list(every_plan_of(part)) for part in parts)):
        if variant and variant.splits_batch and variant.by_blocks != (chosen[0].placement == "stream"):
            continue
        components = {part.name: plan for part, plan in zip(parts, chosen, strict=True)}
        for vae in ways:
            told = add_forecast(footprint, Plan(components=components, vae=vae), CARD, RATES).forecast
            if max(phase.peak_bytes for phase in told) <= size:
                spent = sum(phase.seconds for phase in told)
                best = spent if best is None else min(best, spent)
    return best


def compare(footprint: Footprint, size: int) -> None:
    plan, best = planned(footprint, size), best_of_all(footprint, size)
    if best is None:
        assert plan is None
    else:
        assert plan is not None
        assert seconds(plan) <= best * WITHIN


small_budgets = st.integers(64 * MIB, 3 * GIB)


@settings(deadline=None, max_examples=8)
@given(small_footprints(), small_budgets)
def test_the_best_of_all_is_hardly_better(footprint: Footprint, size: int) -> None:
    compare(footprint, size)


def test_what_works_by_blocks_may_stay_for_its_phase() -> None:
    """There is room for its weights, but not for its activations if it works otherwise."""
    unet, vae = component("unet", "denoiser", [8 * MIB], 10**6), component("vae", "autoencoder", [8 * MIB], 0)
    usual, halved = (passes_of(unet, [10**6 // share], 2, 15_313_980 // share) for share in (1, 2))
    uses = tuple(use.model_copy(update={"layer_work": use.layer_work * 2}) for use in halved.block_uses)
    apart = halved.model_copy(update={"block_uses": uses})
    footprint = Footprint(
        pipeline="Tried", components=(unet, vae), request=Request(height=64),
        phases=(phase("denoise", usual, usual.peak), phase("decode", passes_of(vae, [10**6], 1, MIB), MIB)),
        variants=(Variant(cfg="sequential", by_blocks=True, phases=(phase("denoise", apart, apart.peak),)),),
    )  # fmt: skip
    compare(footprint, 64 * MIB)


@settings(deadline=None, max_examples=8)
@given(small_footprints())
def test_none_of_all_takes_less_than_what_is_said_to_be_needed(footprint: Footprint) -> None:
    with pytest.raises(BudgetTooSmall) as error:
        make_plan(footprint, HERE, Budget(device=1))
    needed = int(str(error.value.facts["needed_bytes"]))
    assert best_of_all(footprint, needed) is not None
    assert best_of_all(footprint, needed - SEGMENT) is None


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(small_footprints(), small_budgets)
def test_the_best_of_all_is_hardly_better_often(footprint: Footprint, size: int) -> None:
    compare(footprint, size)


@pytest.mark.slow
def test_nor_is_it_with_more_layers() -> None:
    """Nine or ten of them: not all selections are tried any more."""
    drawn, ratios = random.Random(1), []
    for _ in range(40):
        count, alike = drawn.choice((9, 10)), drawn.random() < 0.5
        sizes = [MIB * (drawn.choice((16, 64, 128)) if alike else drawn.randint(8, 400)) for _ in range(count)]
        part = component("unet", "denoiser", sizes, 0)
        done = passes_of(part, [drawn.randint(10**9, 2 * 10**12) for _ in sizes], 4, 16 * MIB)
        footprint = Footprint(pipeline="Tried", components=(part,), phases=(phase("denoise", done, 16 * MIB),))
        size = int(drawn.uniform(0.4, 1.1) * sum(sizes)) + 60 * MIB
        plan, best = planned(footprint, size), best_of_all(footprint, size)
        assert (plan is None) == (best is None)
        ratios += [seconds(plan) / best] if plan and best else []
    assert len(ratios) > 20
    assert max(ratios) <= WITHIN
