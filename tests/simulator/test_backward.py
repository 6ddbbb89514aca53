"""Backward passes on simulated cards."""

from __future__ import annotations

import copy

import pytest
import torch

from gradient_checks import PLANS, assert_close, denoiser_call, gradients
from inspection import assert_same, imprint, relative_error
from simulator.conftest import MakeCards
from tightfit import fit
from tightfit.measure.modules import weight_bytes
from tightfit.simulator.storage import free_dead_tensors


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plan", PLANS)
def test_simulated_cards_run_backward_passes(plan: str, make_cards: MakeCards) -> None:
    make_cards()
    network, args, kwargs = denoiser_call("StableDiffusion")
    before = imprint(network)
    untouched = copy.deepcopy(network).to("cpu")
    of_cpu = gradients(untouched, args, kwargs)
    fitted = fit(network, level=0, device="simulated")
    wanted = {name: each.cpu() for name, each in gradients(network, args, kwargs, "privateuseone").items()}
    fitted.undo()
    assert max(relative_error(wanted[name], each) for name, each in of_cpu.items() if each.any()) < 1e-4
    fitted = fit(network, plan={"components": {"model": PLANS[plan]}}, device="simulated")
    for _ in range(2):
        assert_close(gradients(network, args, kwargs, "privateuseone"), wanted)
    fitted.undo()
    assert_same(before, imprint(network))
    assert fitted.live().weights == 0


def test_a_backward_pass_keeps_within_the_memory_for_weights(make_cards: MakeCards) -> None:
    """Weights come again into what they had in the forward pass, and activations are kept between blocks only."""
    (card,) = make_cards()
    network, args, kwargs = denoiser_call("StableDiffusionXL")
    peaks = {}
    for plan in ("resident", "kept", "layers"):
        chosen = PLANS[plan] | ({"gradient_checkpointing": False} if plan == "resident" else {})
        frozen = copy.deepcopy(network).requires_grad_(False)
        fitted = fit(frozen, plan={"components": {"model": chosen}}, device="simulated")
        card.live.reset_peak()
        gradients(frozen, args, kwargs, "privateuseone")
        peaks[plan] = card.live.peak
        fitted.undo()
        del frozen
    weights = weight_bytes(network)
    assert peaks["kept"] < peaks["resident"] - weights / 2
    assert peaks["layers"] < peaks["kept"]


def test_gradients_of_a_card_are_those_of_the_processor(make_cards: MakeCards) -> None:
    """Broadcasting, several uses, no use, two passes through one graph, a graph of gradients, hooks of leaves."""
    make_cards()

    def found(device: str) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        one, two, three = (torch.randn(4, 3).to(device).requires_grad_() for _ in range(3))
        row = torch.randn(3).to(device).requires_grad_()
        one.register_hook(lambda gradient: 2 * gradient)
        result = (one * row + two.exp() @ one.T @ one).sum()
        result.backward(retain_graph=True)
        result.backward()
        kept = [one.grad, two.grad, row.grad, three.grad]
        (slope,) = torch.autograd.grad((two * row).pow(3).sum(), two, create_graph=True)
        kept += torch.autograd.grad(slope.square().sum(), [two, row, three], allow_unused=True)
        return [None if each is None else each.cpu() for each in kept]

    for ours, torchs in zip(found("privateuseone"), found("cpu"), strict=True):
        assert (ours is None) == (torchs is None)
        assert ours is None or torchs is None or relative_error(ours, torchs) < 1e-5
    one, other = (torch.ones(3, device="privateuseone", requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(one.sum(), other)


@pytest.mark.parametrize("plan", PLANS)
def test_graphs_that_are_dropped_are_freed(plan: str, make_cards: MakeCards) -> None:
    (card,) = make_cards()
    network, args, kwargs = denoiser_call("StableDiffusion")
    frozen = copy.deepcopy(network).requires_grad_(False)
    fitted = fit(frozen, plan={"components": {"model": PLANS[plan]}}, device="simulated")
    seen = []
    for _ in range(3):
        latents = args[0].to("privateuseone").requires_grad_()
        others = [each.to("privateuseone") if isinstance(each, torch.Tensor) else each for each in args[1:]]
        named = {key: v.to("privateuseone") if isinstance(v, torch.Tensor) else v for key, v in kwargs.items()}
        frozen(latents, *others, **named)[0].square().mean()
        gradients(frozen, args, kwargs, "privateuseone")
        del latents, others, named
        free_dead_tensors()
        seen.append(card.live.now)
    assert seen[1:] == seen[:2]
    fitted.undo()
