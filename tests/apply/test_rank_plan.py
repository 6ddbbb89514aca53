"""How ranks share an attention: whose keys are gathered although another kind was asked for, and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tightfit.apply.activations.exporting import without_weights
from tightfit.apply.activations.strips.export_graph import capture
from tightfit.apply.activations.strips.stages import StageGraph
from tightfit.apply.context_parallel.rank_plan import RankPlan
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.schema.plan import ContextAttention


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
    assert RankPlan(StageGraph(program), RowShares.equal(ranks), attention).gathered == said
