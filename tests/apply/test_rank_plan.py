"""Shares of rows, and attention among ranks: how exact a ring is, and whose keys are gathered all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tightfit.apply.activations.exporting import without_weights
from tightfit.apply.activations.strips.export_graph import capture
from tightfit.apply.activations.strips.memory_estimate import peak_of
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.stages import StageGraph
from tightfit.apply.activations.strips.strip_peaks import BoundaryState, StripPeak
from tightfit.apply.context_parallel.attention import AttentionInputs, attend_in_ring
from tightfit.apply.context_parallel.rank_plan import RankPlan
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.schema.plan import ContextAttention

if TYPE_CHECKING:
    from tightfit.apply.context_parallel.rank_group import RankGroup


class SelfAttention(nn.Module):
    """Attention among all pixels, with some heads; with a mask, to the first half of them."""

    def __init__(self, heads: int, *, masked: bool = False) -> None:
        super().__init__()
        self.heads, self.masked = heads, masked

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mask = (torch.arange(rows * columns, device=x.device) < rows * columns // 2)[None] if self.masked else None
        found = F.scaled_dot_product_attention(tokens, tokens, tokens, mask)
        return x + found.transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, (rows, columns))


class _Ring:
    """What the first of `size` ranks sees of a ring, on which keys and values pass by."""

    def __init__(self, pairs: list[torch.Tensor]) -> None:
        self.rank, self.size, self._coming = 0, len(pairs), iter(reversed(pairs[1:]))

    def pass_on(self, _: torch.Tensor, coming: torch.Tensor) -> Callable[[], object]:
        return lambda: coming.copy_(next(self._coming))


def test_a_ring_is_as_exact_as_attention_to_all_keys_at_once() -> None:
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(1, 4, 96, 16, generator=generator) + more for more in (0, 0, 3))
        exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
        shares = [Span(0, 40), Span(40, 41), Span(41, 96)]
        pairs = [torch.stack((key, value))[..., span.lo : span.hi, :] for span in shares]
        inputs = AttentionInputs(query, *pairs[0], None, None)
        ring = attend_in_ring(inputs, shares, cast("RankGroup", _Ring(pairs)))
        whole = F.scaled_dot_product_attention(query, key, value)
        squares += torch.stack([(found - exact).square().mean() for found in (ring, whole)])
    assert squares[0] <= squares[1]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(0, 100))
def test_each_rank_has_a_row_however_slow_it_is(speeds: list[float], more: int) -> None:
    rows, ranks = len(speeds) + more, range(len(speeds))
    spans = [RowShares(tuple(speeds)).of(rank, rows) for rank in ranks]
    assert [row for span in spans for row in range(span.lo, span.hi)] == list(range(rows))
    assert all(span.lo < span.hi for span in spans)
    equal = [RowShares.equal(len(speeds)).of(rank, rows) for rank in ranks]
    lengths = [span.hi - span.lo for span in equal]
    assert lengths[0] == max(lengths) <= min(lengths) + 1


@pytest.mark.parametrize(
    ("model", "attention", "ranks", "said"),
    [
        (SelfAttention(4), "heads", 2, ""),
        (SelfAttention(4), "heads", 3, "1 of 1 attentions gather keys, since 3 ranks cannot share 4 heads"),
        (SelfAttention(4), "gathered", 3, ""),
        (SelfAttention(1), "heads", 2, ""),
        (SelfAttention(4), "ring", 3, ""),
        (SelfAttention(4, masked=True), "ring", 2, "1 of 1 attentions gather keys, since a ring takes no masks"),
    ],
)
def test_keys_that_are_gathered_nevertheless_are_named(
    model: SelfAttention, attention: ContextAttention, ranks: int, said: str
) -> None:
    x = torch.empty(1, 8, 12, 4, device="meta")
    program = capture(without_weights(model), lambda double, x: [double.decode(x)], [x])
    assert RankPlan(StageGraph(program), RowShares.equal(ranks), attention).gathered_note == said


class Upscaler(nn.Module):
    """Convolutions, a group norm, attention among all pixels, and twice as many rows at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.norm, self.attention = nn.GroupNorm(4, 16), SelfAttention(1)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention.decode(self.first(x))
        for _ in range(3):
            x = F.silu(self.first(x[:, :4]))
        return self.last(F.interpolate(self.norm(x), scale_factor=2.0, mode="nearest"))


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 1.0)])
def test_strips_of_a_rank_keep_within_their_bytes(speeds: tuple[float, ...]) -> None:
    x = torch.empty(1, 4, 192, 16, device="meta")
    program = capture(without_weights(Upscaler()), lambda double, x: [double.decode(x)], [x])
    graph, shares = StageGraph(program), RowShares(speeds)
    at_once = RankPlan(graph, shares)
    largest = _most_strip_bytes(at_once)
    plans = {part: RankPlan(graph, shares, "ring", largest // part) for part in (1, 2, 4)}
    counts = {part: max(len(each.strips[0]) for each in plan.stages) for part, plan in plans.items()}
    assert 1 == counts[1] < counts[2] < counts[4]
    for part, plan in plans.items():
        assert _most_strip_bytes(plan) <= 1.1 * largest // part
        assert [stage.reads for stage in plan.stages] == [stage.reads for stage in at_once.stages]
        for stage in plan.stages:
            assert len({len(strips) for strips in stage.strips}) == 1


def _most_strip_bytes(plan: RankPlan) -> int:
    """Peak bytes of a stage on the rank with most rows, besides what is kept before or after it."""
    rank, most = max(range(len(plan.shares.speeds)), key=plan.shares.speeds.__getitem__), 0
    for stage in plan.stages:
        begin = BoundaryState(StripPeak(0, 0), None)
        peak, after = peak_of(plan.graph, stage.stage, stage.strips[rank], frozenset(), begin)
        most = max(most, peak.device - max(after.bytes.device, 0))
    return most
