"""Peaks of backward passes, predicted without weights, and what a loop of one's own then reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from a_few import a_few
from gradient_checks import EVERY, PLANS, denoiser_call
from simulator.conftest import ACCELERATOR, MakeCards
from tightfit import Request, fit
from tightfit.catalog.known import known_model
from tightfit.measure.build_models import build_known
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.module_equivalence import call_signature
from tightfit.measure.modules import find_components, find_role
from tightfit.run.argument_values import Given
from tightfit.run.differentiated_calls import require_gradients
from tightfit.run.simulate import SimulationRun, simulate_call
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import free_dead_tensors
from tiny_pipelines import CASES, PIXELS

STEPS = 3
CLOSE = 0.01
SIMULATED = [name for name in PLANS if name != "disk"]  # a simulated card has no disk


def sdxl_inputs() -> dict[str, Any]:
    """Arguments of SDXL's U-Net for training at 1024², on a card."""
    made = {"dtype": torch.float16, "device": NAME}
    added = {"text_embeds": torch.empty(1, 1280, **made), "time_ids": torch.empty(1, 6, **made)}
    return {
        "sample": torch.empty(1, 4, 128, 128, **made),
        "timestep": torch.tensor([500], device=NAME),
        "encoder_hidden_states": torch.empty(1, 77, 2048, **made),
        "added_cond_kwargs": added,
    }


def train(card: SimulatedCard, network: nn.Module, *args: Any, **inputs: Any) -> None:
    """An ordinary training loop, whose optimizer keeps nothing."""
    optimizer = torch.optim.SGD([each for each in network.parameters() if each.requires_grad], lr=1e-3)
    card.accepts_zeros = lambda _: True  # gradients are copied to host memory, and have no values
    for _ in range(STEPS):
        outputs = tree_leaves(network(*args, **inputs))
        losses = [nn.functional.mse_loss(each.float(), torch.zeros_like(each).float()) for each in outputs]
        sum(losses).backward()
        del outputs, losses
        optimizer.step()
        optimizer.zero_grad()
        free_dead_tensors()


def sdxl() -> Any:
    pipe = build_known(known_model("sdxl"))
    require_gradients({"unet": pipe.unet}, Request(backward="lora"))
    return pipe


def peak_of(found: Any) -> int:
    return max(phase.peak_bytes for phase in found.trace.phases if phase.name == "denoise")


@pytest.mark.parametrize("plan", a_few([*SIMULATED, "level 1", "level 2", "level 3"]))
def test_sdxl_at_1024_with_a_lora(plan: str) -> None:
    fields = {"level": int(plan[-1])} if plan.startswith("level") else {"components": {"unet": PLANS[plan]}}
    predicted = peak_of(simulate_call("sdxl", ACCELERATOR, fields, Request(backward="lora", steps=STEPS)))
    with unlimited_card(ACCELERATOR) as card:
        pipe = sdxl()
        fitted = fit(pipe, plan=fields, device="simulated")
        card.live.reset_peak()
        train(card, pipe.unet, **sdxl_inputs())
        reached = card.live.peak
        fitted.undo()
    assert abs(predicted / reached - 1) <= CLOSE


@pytest.mark.parametrize("budget", a_few(["16GB", "8GB", "6GB", "4GB", "2.5GB"]))
def test_a_budget_holds_in_training(budget: str, make_cards: MakeCards) -> None:
    """fit plans for the backward pass, and a loop of one's own keeps within the budget, and near the forecast."""
    (card,) = make_cards(values="shapes", capacity=24 * 2**30)
    pipe = sdxl()
    fitted = fit(pipe, budget=budget, device="simulated", request={"backward": "parameters", "steps": STEPS})
    (forecast,) = (phase for phase in fitted.plan.forecast if phase.name == "denoise")
    train(card, pipe.unet, **sdxl_inputs())
    assert card.held.peak <= forecast.peak_bytes <= float(budget[:-2]) * 1e9
    assert card.held.peak > 0.96 * forecast.peak_bytes
    assert fitted.plan.components["unet"].gradient_checkpointing is not None
    fitted.undo()


def added_by(work: Callable[[], object], card: SimulatedCard, weights: int) -> int:
    """Most bytes on `card` while `work` runs, above those of activations when it begins."""
    before = card.live.now - weights - card.workspace_bytes
    card.live.reset_peak()
    work()
    return card.live.peak - before


MEASURED = [case.name for case in EVERY if case.name != "HiDreamImage"]  # whose routing needs numbers


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plan", SIMULATED)
@pytest.mark.parametrize("name", a_few(MEASURED, "Flux"))
def test_every_denoiser(name: str, plan: str, make_cards: MakeCards) -> None:
    """The call of a pipeline, differentiated on shapes, and its denoiser in a loop of one's own, with numbers.

    What a pipeline holds beside the arguments of its denoiser is left out.
    """
    case = next(case for case in EVERY if case.name == name)
    network, args, kwargs = denoiser_call(name)
    dtype = next(parameter.dtype for parameter in network.parameters())
    pipe: Any = case.make().to(dtype)  # CogVideoX cannot be differentiated in float32
    denoisers = {part: each for part, each in find_components(pipe).items() if find_role(part, each) == "denoiser"}
    fields = {"components": dict.fromkeys(denoisers, PLANS[plan])}
    added: dict[Any, list[int]] = {}
    with unlimited_card(ACCELERATOR) as card:
        simulation = SimulationRun(meta_copy(pipe), card, fields, Request(backward="parameters"))

        def noting(part: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found: list[Any] = []
            weights, same = simulation.fitted.live().weights, added.setdefault((part, call_signature(args, kwargs)), [])
            same.append(added_by(lambda: found.append(call(*args, **kwargs)), card, weights))
            return found[0]

        for part, calls in simulation.differentiated.items():
            calls.replayer = functools.partial(noting, part, calls.differentiated)
        simulation.run(Given(case.call(PIXELS), torch.device("cpu")))
    (card,) = make_cards()
    fitted = fit(pipe, plan=fields, device="simulated")
    given = tree_map(lambda value: value.to(NAME) if isinstance(value, torch.Tensor) else value, (args, kwargs))
    trained = next(each for each in denoisers.values() if type(each).__name__ == type(network).__name__)
    weights = fitted.live().weights
    reached = added_by(lambda: train(card, trained, *given[0], **given[1]), card, weights)
    fitted.undo()
    predicted = max(next(iter(added.values())))  # of all calls like the first
    assert abs(predicted / reached - 1) <= CLOSE, f"{predicted / reached - 1:+.2%}"


@pytest.mark.slow
def test_a_call_between_two_steps_of_training(make_cards: MakeCards) -> None:
    """A picture in between is planned for with room for training; where that does not fit, for itself alone."""
    make_cards()
    case = CASES[0]
    pipe: Any = case.make()
    request = {"backward": "parameters", "height": PIXELS, "width": PIXELS}
    fitted = fit(pipe, budget="100MB", device="simulated", request=request)

    def planned() -> tuple[Any, ...]:
        now = fitted.plan.request
        assert now is not None
        return now.batch, now.guidance, now.backward

    assert planned() == (1, 1.0, "parameters")
    pipe(**case.call(PIXELS))
    assert planned() == (2, 7.5, "parameters")
    pipe(**case.call(2 * PIXELS) | {"num_images_per_prompt": 8, "generator": None})
    assert planned() == (8, None, None)
    pipe(**case.call(PIXELS))
    assert planned() == (2, 7.5, "parameters")
    assert max(phase.peak_bytes for phase in fitted.plan.forecast) <= 100e6
    pipe.vae = case.make().vae  # so that the pipeline is measured anew
    pipe(**case.call(PIXELS))
    assert planned() == (2, 7.5, "parameters")
