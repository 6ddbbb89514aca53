"""Components that are called by themselves within a budget, for which no call of the pipeline was planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tightfit
from simulator.conftest import ACCELERATOR
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, run

CASE = next(case for case in CASES if case.name == "StableDiffusion")
MIB = 2**20
BUDGET = 100 * MIB  # the U-Net's weights are 60 MiB, and its training step needs more
DECODING = 48 * MIB
BY_ITSELF = "unet is called by itself"

pytestmark = pytest.mark.usefixtures("shared_footprints")


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    card = SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": 512 * MIB}), Host(), values="real")
    use_cards([card])
    yield card
    use_cards([])


def steps(pipe: Any, device: Any, count: int = 2) -> list[torch.Tensor]:
    """Losses of a training loop of one's own, for one attention projection."""
    pipe.unet.requires_grad_(False)
    trained = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.requires_grad_(True)
    optimizer, losses = torch.optim.SGD(trained.parameters(), lr=0.1), []
    for _ in range(count):
        loss = call_unet(pipe, device).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def call_unet(pipe: Any, device: Any) -> torch.Tensor:
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2)).to(device)
    prompts = torch.randn(1, 77, pipe.unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(3))
    found: torch.Tensor = pipe.unet(latents, 10, encoder_hidden_states=prompts.to(device)).sample
    return found


def close(ours: Any, theirs: Any) -> bool:
    """Whether all are equal to 1e-5 of the largest value: the simulated card's kernels add in another order."""
    return all((a.cpu() - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("drawn", [False, True], ids=["before any call", "after a call"])
def test_training_within_a_budget_that_was_planned_for_pictures(card: SimulatedCard, drawn: bool) -> None:
    pipe, plain = CASE.make(8), CASE.make(8)
    fitted = tightfit.fit(pipe, budget=BUDGET, device="simulated:0")
    if drawn:
        run(pipe, CASE)
    assert close(steps(pipe, pipe.device), steps(plain, "cpu"))
    assert (fitted.plan.level, fitted.plan.reasons[0].because.startswith(BY_ITSELF)) == (3, True)
    assert card.allocator.reserved.peak <= BUDGET
    assert close([run(pipe, CASE)], [run(plain, CASE)])
    assert fitted.plan.request is not None


@pytest.mark.slow
@torch.no_grad()
def test_latents_that_are_decoded_within_less_than_that_needs(card: SimulatedCard) -> None:
    pipe, plain = CASE.make(), CASE.make()
    fitted = tightfit.fit(pipe, budget=DECODING, device="simulated:0")
    latents = torch.randn(1, 4, 224, 224)
    for _ in range(2):
        assert close([pipe.vae.decode(latents.to(pipe.device)).sample], [plain.vae.decode(latents).sample])
    assert "vae is called by itself" in fitted.plan.reasons[0].because
    assert card.allocator.reserved.peak <= DECODING


@torch.no_grad()
def test_a_network_that_fits_is_planned_for_with_the_first_call(card: SimulatedCard) -> None:
    pipe, plain = CASE.make(), CASE.make()
    fitted = tightfit.fit(pipe, budget=BUDGET, device="simulated:0")
    plan = fitted.plan
    assert close([call_unet(pipe, pipe.device)], [call_unet(plain, "cpu")])
    assert fitted.plan is plan


def test_memory_that_is_too_little_for_level_3_too(card: SimulatedCard) -> None:
    pipe = CASE.make(8)
    tightfit.fit(pipe, budget="3MB", device="simulated:0")
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        call_unet(pipe, pipe.device)
