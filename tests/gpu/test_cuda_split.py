"""A network split over two CUDA cards: the numbers of one card, with every copy ordered before and after its use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tightfit
from more_pipelines import MORE_CASES
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.modules import find_blocks, find_components, has_skips
from tightfit.plan.network_parts import block_order
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_count() < 2, reason="needs two CUDA cards")]


def split_of(pipe: Any, name: str) -> str:
    network = getattr(pipe, name)
    order = block_order(find_blocks(network), has_skips=has_skips(network))
    return order[len(order) // 2]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("StableDiffusion", "stream"),
        ("StableDiffusionXL", "resident"),
        ("Flux", "offload"),
        ("Flux", "stream"),
        ("Wan", "stream"),
    ],
)
def test_a_split_denoiser_gives_the_numbers_of_one_card(name: str, placement: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    before = {part: {path: w.clone() for path, w in m.named_parameters()} for part, m in find_components(pipe).items()}
    together = tightfit.fit(pipe, level=0, device="cuda:0")
    wanted = run(pipe, case).cpu()
    together.undo()
    denoiser = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    fields = {"placement": placement, "split": {"cuda:1": split_of(pipe, denoiser)}}
    fitted = tightfit.fit(pipe, plan={"device": "cuda:0", "components": {denoiser: fields}})
    for _ in range(2):
        assert torch.equal(run(pipe, case).cpu(), wanted)
    phases = {phase.name: phase for phase in fitted.report().trace.phases}
    assert phases["denoise"].other_devices["cuda:1"] > 0
    fitted.undo()
    for part, module in find_components(pipe).items():
        assert all(torch.equal(weight, before[part][path]) for path, weight in module.named_parameters())


def test_a_text_encoder_split_over_both_cards() -> None:
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    together = tightfit.fit(pipe, level=0, device="cuda:0")
    wanted = run(pipe, case).cpu()
    together.undo()
    fields = {"device": "cuda:1", "placement": "stream", "split": {"cuda:0": split_of(pipe, "text_encoder_2")}}
    tightfit.fit(pipe, plan={"device": "cuda:0", "components": {"text_encoder_2": fields}})
    assert torch.equal(run(pipe, case).cpu(), wanted)


@pytest.mark.parametrize("name", ["StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "CogVideoX", "Wan"])
def test_parts_at_work_at_the_same_time_give_the_numbers_of_one_card(name: str) -> None:
    """No card waits for what the other one takes from it: copies are ordered by events, and their memory is kept."""
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    pipe = case.make()
    denoiser = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    footprint = tightfit.measure_footprint(pipe, tightfit.Request(height=64, width=64, steps=2))
    (phase,) = (footprint.phases[index] for index in footprint.denoiser_phases)
    part = {"first": split_of(pipe, denoiser), "outside": list(phase.calls[0].after_blocks)}
    assert part["outside"]
    together = tightfit.fit(pipe, plan={"device": "cuda:0", "components": {denoiser: {"cfg": "sequential"}}})
    wanted = run(pipe, case).cpu()
    together.undo()
    chunks = {"cfg": "batched", "max_batch": 1} if phase.calls[0].paired else {"cfg": "sequential"}
    fields = {**chunks, "split": {"cuda:1": part}}
    fitted = tightfit.fit(pipe, plan={"device": "cuda:0", "components": {denoiser: fields}})
    for _ in range(3):
        assert torch.equal(run(pipe, case).cpu(), wanted)
    assert not fitted.report().trace.notes
    fitted.undo()
