"""What the host does for each layer, and what networks copy themselves, is in a plan's times and the clock's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D

import tightfit
from simulator.conftest import ACCELERATOR, MakeCards
from tightfit.apply.weights.host_overheads import layer_overheads
from tightfit.devices.device import LoopbackDevice
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES

MIB = 2**20
ASKED = {"height": 64, "width": 64}
STEPS = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "overheads"))
    yield
    use_cards([])


@pytest.fixture
def pipe() -> Any:
    """Stable Diffusion with 150 MiB of U-Net."""
    torch.manual_seed(0)
    made = next(case for case in CASES if case.name == "StableDiffusion").make()
    config = dict(made.unet.config) | {"block_out_channels": (256, 384), "attention_head_dim": 8, "norm_num_groups": 32}
    parts = made.components | {"unet": UNet2DConditionModel.from_config(config).eval()}
    made = type(made)(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize(("budget", "longer"), [(100 * MIB, 2.0), pytest.param(120 * MIB, 1.1, marks=pytest.mark.slow)])
def test_forecasts_and_played_times_agree(pipe: Any, budget: int, longer: float) -> None:
    told, played = [], []
    for overhead in (0.0, 2e-4):
        rates = {"streamed_overhead": overhead, "resident_overhead": overhead / 2, "bytes": budget}
        use_cards([SimulatedCard(0, ACCELERATOR.model_copy(update=rates), Host(), values="shapes")])
        fitted = tightfit.fit(pipe, budget=budget, request=ASKED | {"steps": STEPS}, device="simulated:0")
        assert fitted.plan.components["unet"].placement == "stream"
        with torch.no_grad():
            pipe("a fox", **ASKED, num_inference_steps=STEPS, output_type="pt")
        told.append({phase.name: phase.seconds for phase in fitted.plan.forecast}["denoise"])
        played.append({phase.name: phase.seconds for phase in fitted.report().trace.phases}["denoise"])
        fitted.undo()
    assert told == pytest.approx(played, rel=0.03)
    assert played[1] > longer * played[0]


class _WithTable(ResnetBlock2D):
    """Copies 4 MiB from host memory in each call, as some networks do with tables of rotary embeddings."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        table = torch.zeros(2**20).to(hidden.device)
        return super().forward(hidden + table.sum().to(hidden.dtype), *args, **kwargs)  # type: ignore[no-any-return]


def test_copies_of_the_network_wait_for_weights_that_were_sent_before(pipe: Any) -> None:
    played = {}
    for copies in (False, True):
        for block in pipe.unet.modules():
            if type(block) is ResnetBlock2D and copies:
                block.__class__ = _WithTable
        use_cards([SimulatedCard(0, ACCELERATOR, Host(), values="shapes")])
        fitted = tightfit.fit(pipe, budget=100 * MIB, request=ASKED | {"steps": STEPS}, device="simulated:0")
        assert fitted.plan.components["unet"].placement == "stream"
        with torch.no_grad():
            pipe("a fox", **ASKED, num_inference_steps=STEPS, output_type="pt")
        told = {phase.name: phase.seconds for phase in fitted.plan.forecast}["denoise"]
        played[copies] = {phase.name: phase.seconds for phase in fitted.report().trace.phases}["denoise"]
        assert told == pytest.approx(played[copies], rel=0.03)
        fitted.undo()
    assert played[True] > 1.1 * played[False]


def test_a_simulated_card_gives_its_own(make_cards: MakeCards) -> None:
    (card,) = make_cards()
    card.accelerator = card.accelerator.model_copy(update={"streamed_overhead": 3e-5, "resident_overhead": 7e-6})
    found = layer_overheads(SimulatedDevice(0), card.accelerator.launch_overhead)
    assert found.streamed == pytest.approx(3e-5, rel=0.02)
    assert found.resident == pytest.approx(7e-6, rel=0.02)


def test_where_copies_are_the_processors_own() -> None:
    streamed, resident = layer_overheads(LoopbackDevice(), 0.0)
    assert 1e-7 < resident < streamed < 1e-2
