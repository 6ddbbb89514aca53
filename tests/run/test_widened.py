"""Weights in eight bits are widened for each use: what that takes is in a plan's forecast, and so within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn
from torch.nn import functional as F

import tightfit
from simulator.conftest import ACCELERATOR, MakeCards
from tightfit import BudgetTooSmall, Fitted
from tightfit.apply.weights.quantized_tensor import Float8Weight
from tightfit.devices.simulated import SimulatedDevice
from tightfit.measure.modules import inspect_component
from tightfit.plan.eight_bits import widened_bytes
from tightfit.schema.plan import ComponentPlan
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES

MIB = 2**20
REQUEST = {"height": 64, "width": 64, "steps": 2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "widened"))
    yield
    use_cards([])


def stored(weight: torch.Tensor, form: str) -> Any:
    if form == "int8":
        pytest.importorskip("torchao")
        from tightfit.apply.weights.int8 import Int8Weight

        return Int8Weight.store(weight)
    return Float8Weight.store(weight, torch.float8_e4m3fn)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_a_use_takes(form: str, dtype: str, make_cards: MakeCards) -> None:
    make_cards(values="shapes")
    device, layer = SimulatedDevice(0), nn.Sequential(nn.Linear(2048, 2048, bias=False, dtype=getattr(torch, dtype)))
    said = widened_bytes(inspect_component("model", layer), ComponentPlan(storage=form))  # type: ignore[arg-type]
    weight = stored(layer[0].weight.detach(), form).to(device.torch_device)
    tokens = torch.zeros(1, 2048, dtype=getattr(torch, dtype), device=device.torch_device)
    F.linear(tokens, weight)  # cuBLAS keeps its workspace
    before = device.allocated_bytes()
    device.reset_peak()
    F.linear(tokens, weight)
    assert said <= device.peak_bytes() - before <= said + 32 * 2048


@pytest.fixture
def pipe() -> Any:
    """Stable Diffusion with layers of up to 112 MiB, none of which has values."""
    made: Any = next(case for case in CASES if case.name == "StableDiffusion").make()
    wide = {"block_out_channels": (320, 1280), "attention_head_dim": 8, "norm_num_groups": 32}
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(dict(made.unet.config) | wide).eval()
    made = type(made)(**(made.components | {"unet": unet}), requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def on_a_card_of(size: int, pipe: Any) -> Fitted:
    use_cards([SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": size}), Host(), values="shapes")])
    return tightfit.fit(pipe, budget=size, allow=("fp8",), request=REQUEST, device="simulated:0")


@pytest.mark.slow
def test_a_plan_that_is_made_keeps_its_budget(pipe: Any) -> None:
    """On cards of exactly so many bytes: what lossless plans need at the least, and less."""
    with pytest.raises(BudgetTooSmall) as error:
        on_a_card_of(2**20, pipe)
    needed, done = error.value.facts["needed_bytes"], 0
    for size in (needed, needed - 4 * MIB, needed - 40 * MIB):
        try:
            fitted = on_a_card_of(size, pipe)
        except BudgetTooSmall:
            continue
        with torch.no_grad():
            pipe("a fox", height=64, width=64, num_inference_steps=2, output_type="pt")
        told = {phase.name: phase.peak_bytes for phase in fitted.plan.forecast}
        assert all(phase.peak_bytes <= told[phase.name] <= size for phase in fitted.report().trace.phases)
        fitted.undo()
        done += 1
    assert done
