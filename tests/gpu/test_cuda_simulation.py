"""Calls are simulated in a process that uses a real card, and torch's own use of the card stays as it was."""

from __future__ import annotations

import pytest
import torch

import tightfit
from tightfit.devices.cuda_support import cuda_count
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]


@pytest.mark.parametrize("name", ["StableDiffusionXL", "StableDiffusion3", "Flux", "Wan"])
def test_a_pipeline_that_was_called_is_measured_beside_the_card(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    inputs = {key: value for key, value in case.call().items() if key != "output_type"}
    before = tightfit.measure_footprint(pipe, inputs=inputs)
    run(pipe, case)
    pipe.to("cuda")
    allocated = torch.cuda.memory_allocated()
    assert tightfit.measure_footprint(pipe, inputs=inputs) == before
    assert torch.cuda.memory_allocated() == allocated


def test_the_accelerator_stays_the_card() -> None:
    tightfit.measure_footprint(torch.nn.Linear(4, 4), inputs=[(1, 4)])
    assert str(torch.accelerator.current_accelerator()) == "cuda"
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert torch.zeros(4).pin_memory().is_pinned()
    assert torch.Stream().device.type == "cuda"
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    (weight @ torch.ones(4, device="cuda")).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.ones(4, 4))
    assert torch.Generator("cuda").device.type == "cuda"
    assert next(iter(torch.utils.data.DataLoader(range(4), pin_memory=True))).is_pinned()
