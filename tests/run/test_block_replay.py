"""Blocks that are alike work once, and the footprint is that of all of them at work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from more_pipelines import MORE_CASES
from pipeline_classes import cases
from simulator.conftest import MakeCards
from tightfit import fit
from tightfit.measure.block_replay import BlockReplay
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.meta_copy import meta_copy
from tightfit.run.footprints import Measurer
from tightfit.schema.footprint import Footprint, Phase
from tightfit.schema.request import Request
from tightfit.simulator.operations import NAME
from tiny_pipelines import CASES

WIDTH, DEPTH = 64, 5
QUICK = ("StableDiffusionXL", "StableDiffusion3", "Flux")
SLOW = (
    "Wan",
    "CogVideoX",
    "AnimateDiff",
    "HunyuanDiT",
    "LTX2",
    "StableDiffusionXLControlNet",
    "Lumina2",
    "HiDreamImage",
)
Work = Callable[["Block", torch.Tensor], Any]


class Block(nn.Module):
    def __init__(self, work: Work, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, width), nn.GELU()), nn.Linear(width, WIDTH)])
        self.work = work
        self.worked: list[int] = []  # by which a block that has worked differs from one that has not

    def forward(self, tokens: torch.Tensor) -> Any:
        ran.append(self)
        return self.work(self, tokens)


class Network(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            result = block(tokens)
            tokens = result[0] if isinstance(result, tuple) else result
        return tokens


ran: list[Block] = []


def layers(block: Block, tokens: torch.Tensor) -> torch.Tensor:
    for layer in block.inner:
        tokens = layer(tokens)
    return tokens


def halves(block: Block, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """A new tensor, a view of it, and one of what was given, which the network keeps for a moment."""
    new = layers(block, tokens)
    return new, new[:, ::2], tokens.transpose(0, 1), None


def in_place(block: Block, tokens: torch.Tensor) -> torch.Tensor:
    tokens += layers(block, tokens)
    return tokens


def reads(block: Block, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(block.inner), device=tokens.device)
    return layers(block, tokens) * int(places.max())


def keeps(block: Block, tokens: torch.Tensor) -> torch.Tensor:
    block.register_buffer("seen", layers(block, tokens))
    return layers(block, tokens)


def counts(block: Block, tokens: torch.Tensor) -> torch.Tensor:
    """Works twice every other time."""
    block.worked.append(len(block.worked))
    return layers(block, layers(block, tokens) if len(block.worked) % 2 else tokens)


def measured(network: nn.Module, make_cards: MakeCards, *, replay: bool) -> tuple[tuple[Phase, ...], int, float]:
    (card,) = make_cards(values="shapes")
    network = meta_copy(network)  # whose numbers nobody knows
    fit(network, level=0, device="simulated:0")
    tokens = torch.empty(64, 1024, WIDTH, device=NAME)  # too large for numbers
    ran.clear()
    with ExitStack() as undo, torch.no_grad():
        ledger = CallProfiler(card)
        ledger.follow({"model": network}, undo)
        if replay:
            BlockReplay({"model": network}, card, undo).listen(ledger)
        network(tokens)
        network(tokens)
        phases = ledger.phases()
    assert "forward" not in vars(next(network.children())[0])  # type: ignore[index]
    return phases, len(ran), card.now


@pytest.mark.parametrize(
    ("work", "times"),
    [(layers, 2), (halves, 2), (in_place, 2), (reads, 2 * DEPTH), (keeps, 2 * DEPTH), (counts, 2 * DEPTH)],
)
def test_one_works_for_all_that_are_alike(work: Work, times: int, make_cards: MakeCards) -> None:
    """Once in each of two passes; and once more in the first, of which cuBLAS's workspace is a part."""
    usual, *_, seconds = measured(Network(*(Block(work) for _ in range(DEPTH))), make_cards, replay=False)
    found, ran, later = measured(Network(*(Block(work) for _ in range(DEPTH))), make_cards, replay=True)
    assert (found, later) == (usual, seconds)
    assert ran in (times, times + 1)


def test_what_has_hooks_works_itself(make_cards: MakeCards) -> None:
    def network() -> Network:
        made = Network(*(Block(layers) for _ in range(DEPTH)))
        made.blocks[2].inner[1].register_forward_hook(lambda module, given, output: 2 * output)  # type: ignore[index]
        return made

    usual, *_ = measured(network(), make_cards, replay=False)
    found, ran, _ = measured(network(), make_cards, replay=True)
    assert found == usual
    assert ran == 2 * 2 + 1


def test_others_work_themselves(make_cards: MakeCards) -> None:
    def network() -> Network:
        return Network(Block(layers), Block(layers), Block(layers, 2 * WIDTH), Block(halves), Block(layers))

    usual, *_ = measured(network(), make_cards, replay=False)
    found, ran, _ = measured(network(), make_cards, replay=True)
    assert found == usual
    assert ran == 2 * 3 + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_footprints_are_what_they_are_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {case.name: case for case in (*CASES, *MORE_CASES)}.get(name) or cases()[name]
    repeated = []
    once = BlockReplay._repeat
    monkeypatch.setattr("tightfit.run.footprints.lookup", lambda *_: None)
    monkeypatch.setattr(BlockReplay, "_repeat", lambda self, *given: repeated.append(1) or once(self, *given))

    def footprint() -> Footprint:
        return Measurer(case.make(2)).measure(Request(height=64, width=64), None, _variants)

    found, times = footprint(), len(repeated)
    monkeypatch.setattr(BlockReplay, "_follow", lambda *_: None)
    assert footprint() == found
    assert len(repeated) == times > 0


def _variants(known: Footprint) -> tuple[str, ...]:
    return tuple(part for part in known.not_measured if part == "variants")
