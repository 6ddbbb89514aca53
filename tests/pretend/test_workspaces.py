"""Where cuBLAS works: in memory that it keeps, or, from torch 2.15 on, that comes and goes with each product."""

from __future__ import annotations

import pytest
import torch

from pretend.conftest import MakeCards
from tightfit.catalog.cuda import LT_WORKSPACE, workspace_bytes
from tightfit.plan import forecast
from tightfit.pretend import card as cards
from tightfit.pretend import kernels
from tightfit.pretend.card import Card
from tightfit.records import Accelerator

SIZE = workspace_bytes("8.9")


def set_whether_it_stays(monkeypatch: pytest.MonkeyPatch, *, stays: bool) -> None:
    for module in (cards, kernels, forecast):
        monkeypatch.setattr(module, "WORKSPACE_STAYS", stays)


def asked_by_products(card: Card) -> list[int]:
    left, right = (torch.zeros(8, 8, device="privateuseone") for _ in range(2))
    before = len(card.allocator.history)
    for _ in range(2):
        torch.mm(left, right)
        torch.addmm(right[0], left, right)
    return [step.size for step in card.allocator.history[before:] if step.what == "malloc"]


def test_one_stays(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    set_whether_it_stays(monkeypatch, stays=True)
    (card,) = make_cards()
    assert asked_by_products(card) == [256, SIZE, 256, 256, 256]
    assert card.workspace_bytes == SIZE


def test_one_comes_with_each_product(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    set_whether_it_stays(monkeypatch, stays=False)
    (card,) = make_cards()
    assert asked_by_products(card) == [256, SIZE, 256, LT_WORKSPACE] * 2
    assert card.workspace_bytes == 0
    assert card.allocator.allocated.now < SIZE


@pytest.mark.parametrize(("capability", "larger"), [("8.9", 0), ("9.0", workspace_bytes("9.0") - SIZE)])
def test_a_plan_counts_it_once(monkeypatch: pytest.MonkeyPatch, capability: str, larger: int) -> None:
    """One that comes with each product is part of the activations, as large as where they were measured."""
    device = Accelerator(name="cuda:0", kind="c", bytes=2**33, compute_capability=capability)
    set_whether_it_stays(monkeypatch, stays=True)
    stays = forecast.most_weights(2**32, 0, device)
    set_whether_it_stays(monkeypatch, stays=False)
    assert forecast.most_weights(2**32, 0, device) - stays == workspace_bytes(capability) - larger == SIZE
