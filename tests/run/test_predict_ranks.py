"""`tightfit plan --cards-per-node`: what one of several ranks would take; nothing is sent."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, get_args

import pytest
import torch

from simulator.conftest import ACCELERATOR
from tightfit import Budget, BudgetTooSmall, PlanError
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.catalog.known import known_card
from tightfit.errors import InputError
from tightfit.plan.compute_segments import segment_of
from tightfit.run.limits import Limits
from tightfit.run.models import resolve_model
from tightfit.run.predict_ranks import SharedCall, forecast_ranks
from tightfit.run.rank_layout import RankLayout, rank_layout
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.machine import Amounts, KernelGroup
from tightfit.schema.plan import ContextAttention
from tightfit.schema.rank_option import RankOption
from tightfit.schema.request import Request
from tightfit.schema.results import Prediction
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.units import format_enough, format_seconds, parse_rate

REQUEST = Request(height=128, width=128, steps=2)
LINKED = ACCELERATOR.model_copy(
    update={"exchange_rate": 1e9, "exchange_latency": 1e-3, "network_rate": 1e8, "arithmetic_rates": {"float32": 1e9}}
)


def predicted(
    layout: RankLayout, limits: Limits | None = None, request: Request = REQUEST, **choices: Any
) -> Prediction:
    return forecast_ranks(None, "rtx3060", layout, choices, request, lambda _: contextlib.nullcontext(), limits)


def test_the_fastest_kind_of_attention_is_taken() -> None:
    found = predicted(RankLayout(2))
    alone = {way: predicted(RankLayout(2), context_attention=way) for way in get_args(ContextAttention)}
    assert found.trace.seconds == min(each.trace.seconds for each in alone.values())
    assert found.plan.context == 2
    assert found.sent_bytes == alone[found.plan.context_attention].sent_bytes > 0
    assert any("attention of ranks" in reason.decision for reason in found.plan.reasons)
    assert found.fits


def test_two_groups_are_taken_where_they_are_faster_than_sharing_rows() -> None:
    """The demo model calls its denoiser with both guidance predictions in a batch, of which each rank has one."""
    large = Request(height=512, width=512, steps=2, batch=8)
    found = predicted(RankLayout(2), request=large)
    one, two = (predicted(RankLayout(2), request=large, cfg_groups=groups) for groups in (1, 2))
    assert two.trace.seconds < one.trace.seconds
    assert (found.plan.context, found.plan.cfg_groups, found.trace.seconds) == (1, 2, two.trace.seconds)
    assert (one.plan.context, one.plan.cfg_groups) == (2, 1)
    assert 0 < two.sent_bytes < one.sent_bytes
    (reason,) = (each for each in found.plan.reasons if each.decision.startswith("ranks in "))
    assert reason.decision == "ranks in two groups, one for each guidance prediction"
    assert f"with one group {format_seconds(one.trace.seconds)}" in reason.because
    assert not [note for note in found.trace.notes if "whole on every rank" in note]
    assert predicted(RankLayout(3), level=0).plan.cfg_groups == 1


@pytest.mark.parametrize(
    ("per_node", "kind", "carried"), [(4, "exchange", 1000), (2, "network", 2000), (1, "network", 1000)]
)
def test_groups_exchange_over_the_link_that_is_between_them(per_node: int, kind: str, carried: int) -> None:
    """Ranks 0 and 1 are a group, 2 and 3 the other: what 0 sends to 2 goes beside what 1 sends to 3."""
    found: list[KernelCost] = []
    with unlimited_card(LINKED) as card:
        card.kernel_callbacks.append(found.append)
        guidance = GuidanceRanks.among(SimulatedRankGroup(0, 4, per_node, card), 2)
        guidance.swap([torch.empty(1000, dtype=torch.uint8)])
    assert [(each.kind, each.amounts.traffic) for each in found] == [(kind, carried)]
    assert (guidance.rows.size, guidance.rows.per_node) == (2, min(per_node, 2))
    assert guidance.bytes_sent == 1000


@pytest.mark.slow
def test_another_computer_takes_longer_to_reach() -> None:
    rate = parse_rate("10Mbit")
    near, far = (predicted(layout, level=0) for layout in (RankLayout(2), RankLayout(1, 2, rate)))
    assert far.trace.seconds > near.trace.seconds
    assert far.trace.seconds > far.sent_bytes / rate
    assert far.card == "2 computers with 1 × rtx3060"
    assert near.plan.level == far.plan.level == 0


def test_a_budget_is_of_each_card() -> None:
    found = predicted(RankLayout(2), Limits(Budget(device=95 * 10**6)))
    assert found.peak_reserved <= found.capacity == 95 * 10**6
    with pytest.raises(BudgetTooSmall, match="would do"):
        predicted(RankLayout(2), Limits(Budget(device=10**6)))


@pytest.mark.slow
def test_rows_of_an_autoencoder_that_do_not_fit_at_once_are_computed_in_strips() -> None:
    large = Request(height=512, width=512, steps=2)
    call = SharedCall.of(resolve_model(None)[0], large, known_card("rtx3060"), RankLayout(2))
    with pytest.raises(BudgetTooSmall) as refused:
        call.by_option([RankOption(1, "gathered")], {}, Limits(Budget(device=10**6)))
    needed = refused.value.facts["needed_bytes"]
    assert isinstance(needed, int)
    found = predicted(RankLayout(2), Limits(Budget(device=int(0.9 * needed))), large)
    assert found.peak_reserved <= 0.9 * needed
    assert (found.plan.context, found.plan.vae.shared, found.plan.vae.strips) == (2, True, needed // 16)
    (reason,) = (each for each in found.plan.reasons if "in strips within" in each.decision)
    assert f"{format_enough(needed)} would do" in reason.because


@pytest.mark.slow
def test_more_ranks_than_rows_are_said() -> None:
    found = predicted(RankLayout(16), level=0)
    assert any("unet runs whole on every rank" in note for note in found.trace.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, None, None), "there is at least one"),
        ((2, 2, None), "needs the rate between them"),
        ((2, None, "10Gbit"), "between computers"),
        ((2, 2, "fast"), "not the rate of a link"),
        ((64, 64, "10Gbit"), "at the most"),
    ],
)
def test_impossible_layouts_are_refused(given: tuple[int | None, int | None, str | None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rank_layout(*given)
    assert rank_layout(None, None, None) is None
    assert rank_layout(4, 2, "80Gbit") == RankLayout(4, 2, 1e10)


@pytest.mark.parametrize("choices", [{"context": 4}, {"context": 2}])
def test_a_plan_for_other_ranks_is_refused(choices: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="the plan is for"):
        predicted(RankLayout(3), **choices)


def test_exchanges_of_a_ring_take_the_clock_beside_what_is_computed() -> None:
    """An exchange of 11 ms: with 6 ms of arithmetic meanwhile, both take 11; with 20 ms, 20."""
    for milliseconds in (6, 20):
        with unlimited_card(LINKED) as card:
            group = SimulatedRankGroup(0, 2, card=card)
            wait = group.pass_on(torch.empty(10**7, dtype=torch.uint8), torch.empty(10**7, dtype=torch.uint8))
            card.run_kernel(KernelCost("attention", torch.float32, Amounts(milliseconds * 10**6, 0)))
            wait()
            card.run_kernel(KernelCost("memory", torch.float32, Amounts(0, 0)))
            assert card.timeline.end.now / 1e6 == pytest.approx(max(milliseconds, 11), rel=0.01)
            assert group.bytes_sent == 10**7


def test_forecasts_put_a_ring_beside_its_attention() -> None:
    attention = KernelGroup(kind="attention", dtype="float32", operations=40 * 10**6, traffic=0, kernels=2)
    ring = KernelGroup(kind="ring", dtype="float32", operations=0, traffic=10**7, kernels=1)
    waited = ring.model_copy(update={"kind": "exchange"})
    network = ring.model_copy(update={"kind": "network-ring"})
    seconds = {each.kind: segment_of([attention, each], LINKED).seconds for each in (ring, waited, network)}
    assert seconds["ring"] == pytest.approx(0.040)  # 11 ms beside the first 20
    assert seconds["exchange"] == pytest.approx(0.051)
    assert seconds["network-ring"] == pytest.approx(0.040 + 0.101 - 0.020)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_a_link_carries_what_all_cards_of_a_computer_send(per_node: int) -> None:
    found: list[KernelCost] = []
    with unlimited_card(LINKED) as card:
        card.kernel_callbacks.append(found.append)
        SimulatedRankGroup(0, 4, per_node, card).all_gather(torch.empty(1000, dtype=torch.uint8))
    sizes = {each.kind: each.amounts.traffic for each in found}
    near = {"exchange": 1000 * (per_node - 1)} if per_node > 1 else {}
    assert sizes == near | ({"network": 1000 * (4 - per_node) * per_node} if per_node < 4 else {})


@pytest.mark.parametrize("rows", [7, 45, 64, 90])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_first_rank_has_the_largest_of_equal_shares(rows: int, ranks: int) -> None:
    spans = [RowShares.equal(ranks).of(rank, rows) for rank in range(ranks)]
    lengths = [span.hi - span.lo for span in spans]
    assert lengths[0] == max(lengths) <= min(lengths) + 1
    assert (spans[0].lo, spans[-1].hi) == (0, rows)
    assert all(one.hi == other.lo for one, other in itertools.pairwise(spans))
