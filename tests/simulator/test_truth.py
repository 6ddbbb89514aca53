"""What a simulated card counts, beside what a dispatch-level count of the same call on the CPU sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulator.conftest import ACCELERATOR
from tightfit import fit
from tightfit.checkpoint.loading import load_pipeline
from tightfit.run.models import find_model
from tightfit.schema.results import Trace
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, run


def traces(make: Any, call: Any) -> tuple[Trace, Trace]:
    """Of one call on the CPU, counted, and of one on a card that plays a CPU, without numbers."""
    found = []
    use_cards([SimulatedCard(0, ACCELERATOR.model_copy(update={"kind": "cpu"}), Host())])
    for device in ("loopback", "simulated:0"):
        pipe = make()
        fitted = fit(pipe, level=0, device=device)
        call(pipe)
        found.append(fitted.report().trace)
        fitted.undo()
    return found[0], found[1]


def assert_alike(counted: Trace, traced: Trace) -> None:
    assert [phase.name for phase in counted.phases] == [phase.name for phase in traced.phases]
    for truth, phase in zip(counted.phases, traced.phases, strict=True):
        assert phase.peak_weights == truth.peak_weights
        assert phase.peak_bytes == pytest.approx(truth.peak_bytes, rel=0.01), phase.name
        activations = truth.peak_bytes - truth.peak_weights  # a card has a copy of the prompt's tokens, too
        assert phase.peak_bytes - phase.peak_weights == pytest.approx(activations, rel=0.02), phase.name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan", "StableDiffusion3", "LTX", "CogVideoX"])
def test_small_pipelines(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert_alike(*traces(case.make, lambda pipe: run(pipe, case)))


def test_the_demo_pipeline() -> None:
    def call(pipe: Any) -> None:
        pipe.set_progress_bar_config(disable=True)
        pipe("a red circle on the left", num_inference_steps=2, guidance_scale=2.5, output_type="pt")

    assert_alike(*traces(lambda: load_pipeline(find_model(None), torch.float32), call))
