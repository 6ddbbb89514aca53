"""Gradients on a card: weights that come again in the backward pass, and gradients that go to host memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gradient_checks import EVERY, PLANS, assert_close, denoiser_call, gradients, trained, with_lora
from inspection import assert_same, imprint
from tightfit import fit
from tightfit.devices.cuda_support import cuda_count

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

QUICK = ("StableDiffusion",)  # others in `make test-cuda-full`


def _plan(name: str) -> dict[str, Any]:
    return {"components": {"model": PLANS[name]}}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "name", [pytest.param(case.name, marks=() if case.name in QUICK else pytest.mark.full) for case in EVERY]
)
def test_gradients_are_those_of_the_untouched_network(name: str, plan: str) -> None:
    network, args, kwargs = denoiser_call(name)
    before = imprint(network)
    untouched = copy.deepcopy(network).to("cuda")
    wanted = {name: each.cpu() for name, each in gradients(untouched, args, kwargs, "cuda").items()}
    fitted = fit(network, plan=_plan(plan), device="cuda")
    for _ in range(3):
        assert_close(gradients(network, args, kwargs, "cuda"), wanted)
    fitted.undo()
    assert fitted.live().weights == 0
    assert_same(before, imprint(network))


@pytest.mark.parametrize("plan", PLANS)
def test_training_a_lora(plan: str) -> None:
    network, args, kwargs = denoiser_call("StableDiffusion")
    call = (network, tuple(_there(value) for value in args), {name: _there(value) for name, value in kwargs.items()})
    network, untouched = copy.deepcopy(network), copy.deepcopy(network)
    parameters = with_lora(untouched)
    wanted = trained(untouched.to("cuda"), call, parameters)
    parameters = with_lora(network)
    fitted = fit(network, plan=_plan(plan), device="cuda")
    assert trained(network, call, parameters) == pytest.approx(wanted, rel=1e-5)
    fitted.undo()


def _there(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value
