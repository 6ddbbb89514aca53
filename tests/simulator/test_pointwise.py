"""Where torch's pointwise kernels compute the place of each element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME

MakeCards = Callable[..., list[SimulatedCard]]
Work = Callable[[torch.Tensor], object]
BATCH, TOKENS, CHANNELS = 2, 8, 16
ALL = BATCH * TOKENS * CHANNELS


def divisions(card: SimulatedCard, work: Work) -> int:
    """Divisions of the one kernel of `work` on a tensor of tokens."""
    tokens = torch.empty(BATCH, TOKENS, CHANNELS, dtype=torch.float16, device=f"{NAME}:0")
    seen: list[KernelCost] = []
    card.kernel_callbacks.append(seen.append)
    work(tokens)
    card.kernel_callbacks.remove(seen.append)
    (cost,) = seen
    return cost.amounts.divisions


def test_operands_that_are_laid_out_alike_are_loaded_several_elements_at_once(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    assert divisions(card, lambda x: x + x) == 0
    assert divisions(card, lambda x: x * 2.0) == 0
    assert divisions(card, lambda x: F.silu(x.transpose(1, 2))) == 0  # a copy of it would be laid out like that, too
    assert divisions(card, lambda x: x[:1] + x[1:]) == 0


@pytest.mark.parametrize(
    ("work", "times"),
    [
        (lambda x: x * x[0, 0], 1),  # a scale for each channel
        (lambda x: x * x[:, :1], 2),  # for each channel of each item, as a modulation has
        (lambda x: x * x[..., :1], 1),  # for each token
        (lambda x: x * x[0, 0, 0], 1),  # one number that is on the card
        (lambda x: x[..., ::2].contiguous(), 0.5),
        (lambda x: F.silu(x[..., :8]), 0.5),  # half of each row
        (lambda x: x.transpose(1, 2).contiguous(), 4),  # in three dimensions, and turned
        (lambda x: x[0].t().contiguous(), 1),
        (lambda x: x.unflatten(2, (4, 4)) * x[0, :, :4].unsqueeze(1), 3),  # for each token and channel of a head
    ],
)
def test_others_compute_the_place_of_each_element(make_cards: MakeCards, work: Work, times: float) -> None:
    (card,) = make_cards()
    assert divisions(card, work) == times * ALL


def test_other_kernels_have_ways_of_their_own(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    assert divisions(card, lambda x: x.transpose(1, 2).sum(-1)) == 0
    assert divisions(card, lambda x: torch.cat([x, x[:, :1]], 1)) == 0
    assert divisions(card, lambda x: F.layer_norm(x, (CHANNELS,))) == 0
