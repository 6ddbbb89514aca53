"""Out of memory in the middle of a step: the picture comes all the same, and the report tells what it cost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from simulator.conftest import MakeCards
from tightfit import fit
from tightfit.measure.modules import find_components, find_role, weight_bytes
from tightfit.simulator.blocks import Block
from tightfit.simulator.card import SimulatedCard
from tiny_pipelines import CASES, TinyCase, run


class Failing:
    """Refuses memory at chosen requests of those that are made while a layer is at work."""

    def __init__(self, card: SimulatedCard, monkeypatch: pytest.MonkeyPatch, networks: Iterable[nn.Module]) -> None:
        self.requests = self.at_work = 0
        self.refused: set[int] = set()
        malloc = card.malloc

        def sometimes(size: int) -> Block:
            self.requests += self.at_work > 0
            if self.at_work and self.requests in self.refused:
                self.refused.remove(self.requests)
                raise torch.OutOfMemoryError(f"injected at request {self.requests}")
            return malloc(size)

        monkeypatch.setattr(card, "malloc", sometimes)
        for layer in (m for network in networks for m in network.modules() if list(m.parameters(recurse=False))):
            layer.register_forward_pre_hook(lambda *_: self.works(1))
            layer.register_forward_hook(lambda *_: self.works(-1), always_call=True)

    def works(self, more: int) -> None:
        self.at_work += more

    def refuse(self, count: int, of: int, chosen: random.Random) -> None:
        """Refuses `count` of the next `of` requests."""
        self.refused = {self.requests + 1 + number for number in chosen.sample(range(of), count)}


def requests_of(pipe: Any, case: TinyCase, failing: Failing) -> int:
    begun = failing.requests
    run(pipe, case)
    return failing.requests - begun


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("StableDiffusion", 6),
        pytest.param("Flux", 6, marks=pytest.mark.slow),
        pytest.param("StableDiffusion", 100, marks=pytest.mark.slow),
        pytest.param("Flux", 100, marks=pytest.mark.slow),
    ],
)
def test_injected_errors_do_not_change_the_picture(
    name: str, rounds: int, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 2**13)
    case: TinyCase = next(case for case in CASES if case.name == name)
    pipe = case.make()
    untouched = run(pipe, case)
    (card,) = make_cards()
    denoiser = next(n for n, part in find_components(pipe).items() if find_role(n, part) == "denoiser")
    half = weight_bytes(getattr(pipe, denoiser)) * 3 // 4
    parts: dict[str, Any] = {n: {"placement": "offload"} for n in find_components(pipe)}
    plan = {"components": parts | {denoiser: {"placement": "stream", "weight_memory": half}}}
    failing = Failing(card, monkeypatch, find_components(pipe).values())
    fitted = fit(pipe, plan=plan, device="simulated:0")
    requests, chosen, told = requests_of(pipe, case, failing), random.Random(0), 0
    for _ in range(rounds):
        failing.refuse(1, requests, chosen)
        assert torch.equal(run(pipe, case).cpu(), untouched)
        told += any("out of memory" in note for note in fitted.report().trace.notes)
        fitted.undo()  # what was shed comes back
        fitted = fit(pipe, plan=plan, device="simulated:0")
    assert told >= 0.95 * rounds  # few calls make fewer requests than the first, when the order is known
    assert fitted.live().weights == 0


def test_several_errors_in_one_call(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 2**13)
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    untouched = run(pipe, case)
    (card,) = make_cards()
    failing = Failing(card, monkeypatch, find_components(pipe).values())
    parts = {n: {"placement": "offload"} for n in find_components(pipe)}
    fitted = fit(pipe, plan={"components": parts}, device="simulated:0")
    failing.refuse(5, requests_of(pipe, case, failing), random.Random(1))
    assert torch.equal(run(pipe, case).cpu(), untouched)
    assert not failing.refused
    assert any("resident weights are streamed from then on" in note for note in fitted.report().trace.notes)


def test_where_nothing_can_give_way_the_error_is_torchs(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    (card,) = make_cards()
    failing = Failing(card, monkeypatch, find_components(pipe).values())
    fitted = fit(pipe, level=0, device="simulated:0")
    failing.refuse(1, requests_of(pipe, case, failing), random.Random(0))
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        run(pipe, case)
    fitted.undo()


class Greedy(nn.Module):
    """Writes into its input, and then asks for memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        for block in self.blocks:
            x = block(x)
        return x


def test_what_has_written_into_its_input_is_not_run_again(
    make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    (card,) = make_cards()
    network = Greedy()
    failing = Failing(card, monkeypatch, [network])
    fit(network, plan={"components": {"model": {"placement": "offload"}}}, device="simulated:0")
    with torch.no_grad():
        network(torch.ones(2, 64, device="privateuseone:0"))
        failing.refuse(1, 1, random.Random(0))
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            network(torch.ones(2, 64, device="privateuseone:0"))
    assert not failing.refused
