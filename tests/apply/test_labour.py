"""What a footprint says of strips is what a run of them gives a card to do, and the time that this takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from apply.test_strips import prepared
from simulator.conftest import ACCELERATOR
from tightfit import fit
from tightfit.measure.modules import inspect_component
from tightfit.measure.passes import KernelCounter
from tightfit.plan.component_cost import ComponentCost
from tightfit.plan.cost_model import CostModel
from tightfit.plan.layer_selection import weight_group_sizes
from tightfit.plan.strip_times import strip_seconds_without_weights
from tightfit.run.strip_profiles import StripOptionProfiler
from tightfit.schema.footprint import STRIP_OPTIONS, BlockUse, ComponentCall, StripProfile
from tightfit.schema.machine import KernelGroup
from tightfit.schema.plan import ComponentPlan
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.timeline import Host
from tiny_autoencoders import CASES, TinyAutoencoder, decode

WHOLE = 800_000  # bytes, of which strips get a quarter, a 16th and a 64th
ROWS = 12
SLOW: dict[str, Any] = {  # so that a tiny network computes, launches and waits for its maps about as long
    "arithmetic_rates": {"float32": 1e10}, "memory_rate": 5e9, "link_rate": 5e8, "link_rate_out": 4e8,
    "launch_overhead": 5e-6,
}  # fmt: skip
QUICK = ["AutoencoderKL", "AutoencoderTiny", "AutoencoderKLLTXVideo"]
OTHERS = [case.name for case in CASES if case.name not in QUICK and not case.large]


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    card = SimulatedCard(0, ACCELERATOR.model_copy(update=SLOW), Host(), "real")
    use_cards([card])
    yield card
    use_cards(())


def ways_of(name: str) -> tuple[TinyAutoencoder, Any, torch.Tensor, list[StripProfile]]:
    case, model = prepared(name)
    rows = case.only_rows or max(ROWS // case.granule * case.granule, case.least_rows)
    latents = case.latents(rows, 1)
    survey = StripOptionProfiler(model, "decode", (latents,), case.decode_kwargs(1))
    ways = [survey.profile(WHOLE // share, maps, 0, 0) for share, maps in STRIP_OPTIONS.values()]
    return case, model, latents, [way for way in ways if way is not None]


def on(value: Any) -> Any:
    """The same on the card, if it is a tensor."""
    return value.to("privateuseone:0") if isinstance(value, torch.Tensor) else value


def summed(works: Iterable[KernelGroup]) -> Counter[tuple[str, str, str]]:
    sums: Counter[tuple[str, str, str]] = Counter()
    for work in works:
        for what in ("operations", "traffic", "kernels"):
            sums[work.kind, work.dtype, what] += getattr(work, what)
    return sums


SLOW_LINK = {**SLOW, "link_rate": 2e8}  # decodes of Wan and Mochi take up to a fifth longer for their weights
STREAMED = ["AutoencoderKLWan", "AutoencoderKLCogVideoX"]  # whose layers are larger than what sizes are rounded up to


class Played(NamedTuple):
    """A way on a card."""

    seconds: float
    works: list[KernelCost]  # of its kernels
    came: int  # bytes of maps
    went: int


def played(
    case: TinyAutoencoder,
    model: Any,
    latents: torch.Tensor,
    way: StripProfile,
    card: SimulatedCard,
    weights: ComponentPlan | None = None,
) -> Played:
    plan = {"level": 0} if weights is None else {"components": {"model": weights.to_mapping()}}
    fitted = fit(
        model, plan={**plan, "vae": {"strips": way.strip_bytes, "feature_maps": way.feature_maps}}, device="simulated:0"
    )
    given, works, came = latents.to("privateuseone:0"), list[KernelCost](), list[int]()

    def copy_in(size: int, *, pinned: bool, wait: bool) -> None:
        came.append(size if pinned else 0)  # what is not page-locked are constants
        SimulatedCard.copy_in(card, size, pinned=pinned, wait=wait)

    card.copy_in = copy_in  # type: ignore[method-assign]
    there = replace(case, decode_kwargs=lambda batch: {k: on(v) for k, v in case.decode_kwargs(batch).items()})
    card.timeline.synchronize()
    came.clear()
    began, card.bytes_out = card.now, 0
    card.kernel_callbacks.append(works.append)
    decode(model, there, given, 1)
    card.kernel_callbacks.clear()
    found = Played((card.now - began) * 1e-9, works, sum(came), card.bytes_out)
    fitted.undo()  # which looks at weights on the card for changes
    return found


def assert_alike(name: str, card: SimulatedCard) -> list[tuple[float, float]]:
    """Of each way, the seconds that are said and those that it takes."""
    case, model, latents, ways = ways_of(name)
    times = []
    for way in ways:
        seconds, works, came, went = played(case, model, latents, way, card)
        tally = KernelCounter()
        for work in works:
            tally.add(work)
        assert summed(work for stage in way.stages for work in stage.work) == summed(tally.workloads())
        assert (sum(stage.bytes_in for stage in way.stages), sum(stage.bytes_out for stage in way.stages)) == (
            came,
            went,
        )
        timings = CostModel(inspect_component("vae", model), card.accelerator).timings(way, 1.0, None)
        times.append((strip_seconds_without_weights(timings, way.batch_items), seconds))
    return times


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", QUICK)
def test_what_is_said_of_strips_is_what_is_done(name: str, card: SimulatedCard) -> None:
    assert assert_alike(name, card)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_said_of_any_autoencoder_is_what_is_done(name: str, card: SimulatedCard) -> None:
    assert_alike(name, card)


@pytest.mark.slow
def test_the_time_of_strips_is_known_wherever_maps_wait(card: SimulatedCard) -> None:
    times = assert_alike("AutoencoderKL", card)
    assert len(times) == 6  # three sizes, on the device and in host memory
    for said, took in times:
        assert said == pytest.approx(took, rel=0.02)


def assert_streamed(name: str, ring: int, count: int) -> None:
    """What is said of `count` ways comes true over a link so slow that decodes wait for their weights."""
    card = SimulatedCard(0, ACCELERATOR.model_copy(update=SLOW_LINK), Host(), "real")
    use_cards([card])
    case, model, latents, ways = ways_of(name)
    part = inspect_component("model", model)
    largest = max(weight_group_sizes(part, "layer", ComponentPlan(placement="stream")).values())
    plan = ComponentPlan(placement="stream", granularity="layer", ring_buffer=ring * largest, resident_layers=())
    for way in ways[:count]:
        turns = tuple(turn for stage in way.stages for turn in (*stage.before_strips, *stage.layer_work))
        use = BlockUse(block="", live_bytes_at_start=0, peak=0, layer_work=turns)
        done = ComponentCall(component="model", method="decode", peak=0, block_uses=(use,))
        streaming = ComponentCost(part, plan, card.accelerator, CostModel(part, card.accelerator))
        said = streaming.work(done, 1, streaming.begin_load(0.0), way)
        took = played(case, model, latents, way, card, plan).seconds
        assert said == pytest.approx(took, rel=0.03)


@pytest.mark.parametrize("ring", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_time_of_strips_is_known_where_layers_come_again_for_each_of_them(ring: int) -> None:
    assert_streamed("AutoencoderKLMochi", ring, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("name", STREAMED)
def test_the_time_of_strips_is_known_where_layers_of_others_come_again(name: str, ring: int) -> None:
    assert_streamed(name, ring, 6)
