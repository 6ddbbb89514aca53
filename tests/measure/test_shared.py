"""Modules and weights that several components have in common, and whose they are."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from tightfit.measure.shared import give_owners


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)
        self.token = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[0](self.first(x))) + self.token


def borrowing(owner: Network) -> Network:
    network = Network()
    network.first, network.blocks, network.token = owner.first, owner.blocks, owner.token
    return network


def test_what_is_shared_is_the_firsts_alone_until_undone() -> None:
    other = borrowing(owner := Network())
    names, wanted = list(other.state_dict()), other(torch.ones(1, 2))
    with ExitStack() as undo:
        give_owners([owner, other], undo.callback)
        assert [name for name, _ in other.named_parameters()] == ["token", "last.weight", "last.bias"]
        assert not {id(weight) for weight in owner.parameters()} & {id(weight) for weight in other.parameters()}
        assert len(list(owner.parameters())) == 7
        assert other.first is owner.first
        assert torch.equal(other(torch.ones(1, 2)), wanted)
    assert list(other.state_dict()) == names
    assert [name for name, _ in other.named_children()] == ["first", "blocks", "last"]
    assert other.token is owner.token
    assert "first" not in vars(other)


def test_what_was_replaced_in_between_stays_replaced() -> None:
    other = borrowing(owner := Network())
    new = nn.Linear(2, 2)
    with ExitStack() as undo:
        give_owners([owner, other], undo.callback)
        other.last = new
    assert other.last is new
    assert other.first is owner.first


def test_lists_and_components_inside_others_stay_as_they_are() -> None:
    owner, sequence = Network(), nn.Sequential()
    sequence.append(owner.first)
    before = [list(part.named_modules()) for part in (owner, sequence)]
    with ExitStack() as undo:
        give_owners([owner, sequence, owner.blocks[0]], undo.callback)
        assert [list(part.named_modules()) for part in (owner, sequence)] == before
