"""Where cuBLAS and cuBLASLt work: in memory that they keep, or that comes and goes with each product."""

from __future__ import annotations

import pytest
import torch

from simulator.conftest import MakeCards
from tightfit.catalog import cuda
from tightfit.catalog.cuda import LT_WORKSPACE, workspace_bytes
from tightfit.plan import forecast
from tightfit.schema.machine import Accelerator
from tightfit.simulator import card as cards
from tightfit.simulator.card import SimulatedCard

SIZE = workspace_bytes("8.9")


def as_in_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda, cards, forecast):
        monkeypatch.setattr(module, "KEEPS_WORKSPACE", version != "2.15")
    monkeypatch.setattr(cuda, "LT_SHARES_WORKSPACE", version == "2.12")


def asked_by_products(card: SimulatedCard) -> list[int]:
    left, right = (torch.zeros(8, 8, device="privateuseone") for _ in range(2))
    before = len(card.allocator.history)
    for _ in range(2):
        torch.mm(left, right)
        torch.addmm(right[0], left, right)
    return [step.size for step in card.allocator.history[before:] if step.what == "malloc"]


@pytest.mark.parametrize(
    ("version", "asked", "resident"),
    [
        ("2.11", [256, SIZE, 256, LT_WORKSPACE, 256, 256], SIZE + LT_WORKSPACE),
        ("2.12", [256, SIZE, 256, 256, 256], SIZE),
        ("2.15", [256, SIZE, 256, LT_WORKSPACE] * 2, 0),
    ],
)
def test_products_work_where_they_do_in_torch(
    version: str, asked: list[int], resident: int, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_in_torch(version, monkeypatch)
    (card,) = make_cards()
    assert asked_by_products(card) == asked
    assert card.workspace_bytes == resident


@pytest.mark.parametrize(
    ("version", "capability", "beside"),
    [
        ("2.11", "8.9", SIZE + LT_WORKSPACE),
        ("2.12", "8.9", SIZE),
        ("2.12", "9.0", workspace_bytes("9.0")),
        ("2.15", "8.9", 0),
        ("2.15", "9.0", workspace_bytes("9.0") - SIZE),
    ],
)
def test_a_plan_counts_each_once(version: str, capability: str, beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes with each product is part of the activations, as large as where they were measured."""
    as_in_torch(version, monkeypatch)
    device = Accelerator(name="cuda:0", kind="cuda", bytes=2**33, compute_capability=capability)
    monkeypatch.setattr(forecast, "MARGIN", 0)
    monkeypatch.setattr(forecast, "PERCENT", 0)
    monkeypatch.setattr(forecast, "PAGE_TAIL", 0)
    assert 2**32 - forecast.most_weights(2**32, 0, device) == beside
