"""Others' offloading on a simulated card: the pictures are the same, and weights come and go as on a card."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from make_guides import ROOT
from simulator.conftest import MakeCards
from tightfit.measure.modules import find_components, weight_bytes
from tiny_pipelines import CASES, run

WAYS = ["all on the card", "diffusers: models", "diffusers: leaves", "diffusers: blocks", "diffusers: sequential"]


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setattr(torch.Tensor, "data", torch.Tensor.data)  # as it is now, when the test is over
    return importlib.import_module("rivals")


@pytest.mark.parametrize("name", ["StableDiffusion", "Flux"])
@pytest.mark.parametrize("way", WAYS)
def test_the_picture_is_the_same(way: str, name: str, rivals: ModuleType, make_cards: MakeCards) -> None:
    case = next(case for case in CASES if case.name == name)
    wanted = run(case.make(), case)
    (card,) = make_cards()
    rivals.let_data_move()
    pipe = rivals.CONTENDERS[way](case.make(), torch.device("privateuseone:0"))
    before = card.bytes_in
    for _ in range(2):
        assert torch.equal(run(pipe, case).cpu(), wanted)
    weights = sum(weight_bytes(part) for part in find_components(pipe).values())
    moved = card.bytes_in - before
    assert moved < weights / 10 if way == "all on the card" else moved > 1.9 * weights
