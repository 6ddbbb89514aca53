"""Exchanges of ranks that go through the host take its link from streamed weights."""

from __future__ import annotations

import pytest
import torch

from simulator.conftest import ACCELERATOR
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.catalog.known import known_card
from tightfit.plan.compute_segments import merge_segments, segment_of
from tightfit.plan.timeline import TransferSimulator
from tightfit.run.models import resolve_model
from tightfit.run.predict_ranks import SharedCall
from tightfit.run.rank_layout import RankLayout
from tightfit.run.simulate import SimulationRun
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.machine import Accelerator, KernelGroup
from tightfit.schema.rank_option import RankOption
from tightfit.schema.request import Request

SLOW = ACCELERATOR.model_copy(
    update={"link_rate": 1e9, "link_rate_out": None, "exchange_rate": 5e8, "launch_overhead": 0.0}
)
NVLINK = SLOW.model_copy(update={"exchange_rate": 5e9})
REQUEST = Request(height=128, width=128, steps=3)


def test_which_exchanges_go_through_the_host() -> None:
    for name in ("rtx4090", "rtx3060"):
        card = known_card(name)
        assert card.exchange_link_seconds("ring", 10**9) == 10**9 / card.link_rate
        assert card.exchange_link_seconds("exchange", 10**9) == 10**9 / card.link_rate
        assert card.exchange_link_seconds("network", 10**9) == 0
        assert card.exchange_link_seconds("memory", 10**9) == 0
    assert known_card("h100").exchange_link_seconds("ring", 10**9) == 0
    assert SLOW.model_copy(update={"exchange_rate": None}).exchange_link_seconds("ring", 10**9) == 0
    assert SLOW.model_copy(update={"kind": "cpu"}).exchange_link_seconds("ring", 10**9) == 0


@pytest.mark.parametrize(("accelerator", "ends"), [(SLOW, 20), (NVLINK, 10)])
@pytest.mark.parametrize("engine", ["in", "out"])
def test_a_copy_waits_for_what_an_exchange_takes_of_the_link(accelerator: Accelerator, ends: int, engine: str) -> None:
    """10 MB are exchanged in 20 ms, of which the link's other half could carry 10 MB; 10 MB are copied meanwhile."""
    with unlimited_card(accelerator) as card:
        payload = torch.empty(10**7, dtype=torch.uint8)
        SimulatedRankGroup(0, 2, card=card).pass_on(payload, payload)
        with card.on(card.new_stream()):
            (card.copy_in if engine == "in" else card.copy_out)(10**7, pinned=True, wait=True)
        assert card.host.now / 1e6 == pytest.approx(ends, rel=0.01)


@pytest.mark.parametrize(("accelerator", "taken"), [(SLOW, 0.01), (NVLINK, 0.0)])
def test_a_forecast_loads_weights_after_exchanges(accelerator: Accelerator, taken: float) -> None:
    """Two layers of 20 ms of the link each, whose arithmetic takes less: a call takes what the link does."""
    ring = KernelGroup(kind="ring", dtype="float32", operations=0, traffic=10**7, kernels=1)
    segments = [segment_of([ring], accelerator, name) for name in ("a", "b")]
    assert [each.exchanging for each in segments] == [taken, taken]
    run = TransferSimulator(["a", "b"], {"a": 2 * 10**7, "b": 2 * 10**7}, (), 2 * 10**7, 1e9)
    seconds = [run.work([each._replace(seconds=0.001) for each in segments]) for _ in range(4)]
    assert seconds[-1] == pytest.approx(2 * (0.02 + taken), abs=0.003)


def test_merged_segments_take_the_link_together() -> None:
    ring = KernelGroup(kind="ring", dtype="float32", operations=0, traffic=10**7, kernels=1)
    segment = segment_of([ring], SLOW, "a")
    (merged,) = merge_segments([segment, segment], 0.5)
    assert merged.exchanging == pytest.approx(0.01)


def seconds_of(accelerator: Accelerator) -> tuple[float, float]:
    """Predicted and played seconds of the demo model's streamed call, as one of two ranks with a ring."""
    option = RankOption(1, "ring")
    model, _ = resolve_model(None)
    call = SharedCall.of(model, REQUEST, accelerator, RankLayout(2))
    found = call.predicted(0, option, {"level": 3}, None)
    with unlimited_card(accelerator) as card:
        plan = found.plan.model_copy(update={"device": "simulated:0"})
        run = SimulationRun(model, card, plan, REQUEST, parallel=call.ranks(0, option))
        run.run()
        return found.trace.seconds, float(run.fitted.report().trace.seconds)


def test_a_streamed_call_is_as_long_as_predicted() -> None:
    """The link is so slow that weights fill it; layers are announced in the order in which the program needs them."""
    slow = SLOW.model_copy(update={"link_rate": 1e8, "exchange_rate": 9e7})
    (predicted, played), (alone, played_alone) = map(
        seconds_of, (slow, slow.model_copy(update={"exchange_rate": 1.1e8}))
    )
    assert predicted == pytest.approx(played, rel=0.02)
    assert alone == pytest.approx(played_alone, rel=0.02)
    assert predicted > alone
    assert played > played_alone
