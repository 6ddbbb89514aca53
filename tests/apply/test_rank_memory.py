"""What a rank keeps of gathered keys, and what statistics of its rows take: peaks with and without saving them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.apply.activations.exporting import without_weights
from tightfit.apply.activations.strips.export_graph import capture
from tightfit.apply.activations.strips.program_inputs import LiveWeights
from tightfit.apply.activations.strips.stages import StageGraph
from tightfit.apply.context_parallel import rank_runner
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.rank_plan import RankPlan
from tightfit.apply.context_parallel.rank_runner import RankRunner
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.devices.device import CpuDevice
from tightfit.measure.meter import TensorMeter
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import ContextAttention

ROWS, COLUMNS, CHANNELS = 32, 16, 8
MAP = ROWS * COLUMNS * CHANNELS * 4  # bytes of all rows


class AloneRankGroup(RankGroup):
    """The only rank of its group, which has all rows."""

    def __init__(self) -> None:
        self.rank, self.size, self.bytes_sent = 0, 1, 0

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def exchange(self, sent: object, received: object) -> None:
        assert not sent
        assert not received


class Block(nn.Module):
    """Attention among all pixels, and then a wide feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.query = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))
        self.wide, self.narrow = nn.Linear(CHANNELS, 8 * CHANNELS), nn.Linear(8 * CHANNELS, CHANNELS)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2)
        query, key, value = ((tokens @ each.weight.T)[:, None] for each in (self.query, self.keys, self.values))
        tokens = F.scaled_dot_product_attention(query, key, value)[:, 0]
        tokens = self.narrow(F.silu(self.wide(tokens)))
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))


class Normed(nn.Module):
    """Two wide convolutions and a group norm of what the second makes, of which little is returned."""

    def __init__(self) -> None:
        super().__init__()
        wide = 4 * CHANNELS
        self.first, self.second = (nn.Conv2d(given, wide, 3, padding=1) for given in (CHANNELS, wide))
        self.norm = nn.GroupNorm(4, wide)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))[:, :1]


def run(module: nn.Module, attention: ContextAttention = "gathered") -> tuple[torch.Tensor, int]:
    """The output of the rank, and its peak bytes; both are compared with those of `module` itself."""
    x = torch.randn(1, CHANNELS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    double = without_weights(module)
    program = capture(double, lambda double, x: [double.decode(x)], [torch.empty_like(x, device="meta")])
    plan = RankPlan(StageGraph(program), RowShares.equal(1), attention)
    runner = RankRunner(plan, AloneRankGroup(), LiveWeights(module, program), Recorder(CpuDevice()))
    changes: list[int] = []
    with torch.no_grad(), TensorMeter(changes.append):
        (found,) = runner.run_share([x])
    with torch.no_grad():
        torch.testing.assert_close(found, module.decode(x), rtol=1e-5, atol=1e-6)
    return found, max(itertools.accumulate(changes))


@pytest.mark.parametrize("attention", ["gathered", "ring"])
def test_keys_and_values_are_freed_after_their_attention(
    attention: ContextAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    block = Block().eval()
    found, peak = run(block, attention)
    monkeypatch.setattr(RankPlan, "_used_up", lambda *_: {})
    kept, more = run(block, attention)
    assert torch.equal(found, kept)
    maps = 4 if attention == "gathered" else 2  # keys and values, of the rank and gathered
    assert more - peak == maps * MAP


def test_statistics_of_rows_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = Normed().eval()
    _, more = run(network)
    monkeypatch.setattr(rank_runner, "MEASURED_AT_ONCE", MAP // 8)
    _, peak = run(network)
    assert peak <= more - 3 * MAP  # a copy of the second convolution's four maps


@pytest.mark.parametrize(("rows", "count"), [(8, 3), (3, 8), (7, 1), (0, 0), (5, 0)])
def test_pieces_are_all_rows(rows: int, count: int) -> None:
    ends = rank_runner._even_ends(rank_runner.Span(2, 2 + rows), count)
    assert ends == sorted(set(ends))
    assert len(ends) == min(count, rows) + 1
    assert ends[0] == 2
    assert ends[-1] == (2 + rows if count else 2)
