"""Outputs of encoders that are replayed, keys and values of language models among them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from simulator.conftest import ACCELERATOR
from tightfit.run.pass_replay import CallReplayer
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import free_dead_tensors

SHAPE = (1, 2, 300, 200)  # too large for a simulated card to keep values


class Encoder(nn.Module):
    """Returns hidden states, and whatever `more` makes beside them."""

    def __init__(self, card: SimulatedCard, more: type[object]) -> None:
        super().__init__()
        self._card, self._more, self.calls = card, more, 0

    def forward(self, number: int) -> tuple[torch.Tensor, object]:
        self.calls += 1
        hidden = torch.empty(SHAPE, device=torch.device(NAME, self._card.index))
        made = self._more()
        if isinstance(made, DynamicCache):
            made.update(hidden.clone(), hidden.transpose(2, 3).clone(), number)
        return hidden, made


class Slotted:
    """An object whose attributes are not in a dictionary, of no known library."""

    __slots__ = ("tensor",)


def live(card: SimulatedCard) -> int:
    free_dead_tensors()
    return card.allocator.allocated.now


@pytest.mark.parametrize(("more", "calls"), [(DynamicCache, 1), (int, 1), (Slotted, 2)])
def test_an_encoder_runs_once_unless_its_output_is_an_unknown_object(more: type[object], calls: int) -> None:
    with unlimited_card(ACCELERATOR) as card:
        encoder = Encoder(card, more)
        replayer = CallReplayer(encoder)
        (hidden, first), before = replayer(0), live(card)
        replayer.again()
        again, other = replayer(0)
        assert encoder.calls == calls
        assert (again.shape, again.stride()) == (hidden.shape, hidden.stride())
        assert again.data_ptr() != hidden.data_ptr()
        assert live(card) == 2 * before
        if isinstance(first, DynamicCache):
            assert isinstance(other, DynamicCache)
            assert other is not first
            own, made = ((cache.layers[0].keys, cache.layers[0].values) for cache in (first, other))
            assert [(one.shape, one.stride()) for one in own] == [(one.shape, one.stride()) for one in made]
            assert other.get_seq_length() == first.get_seq_length() == 300
