"""Every trial of trials.py comes out as it says, in each way; docs/works-together.md has the same outcomes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tightfit.devices.simulated import SimulatedDevice
from together.trials import GROUPS
from together.ways import WAYS, Trial, Way, draw, made, outcome

pytestmark = [
    pytest.mark.usefixtures("shared_footprints"),
    pytest.mark.filterwarnings("ignore"),  # of diffusers, peft and transformers, about what is tried
]

PAGE = Path(__file__).parents[2] / "docs" / "works-together.md"
SOON = {  # in `make test`, by the way; all others in `make test-slow`
    "level": (
        "loaded and fused after, undone without a call", "`module.to(module.device)`", "`module.to('cpu')`",
        "scheduler used by itself after `undo`", "`pipe.to('meta')`", "run out of memory themselves",
    ),
    "budget": (
        "loaded with an image encoder after", "three threads ask for three sizes at once",
        "run out of memory themselves",
    ),
    "disk": (
        "`copy.deepcopy` of the pipeline and of its U-Net", "`pickle` of the pipeline and of its U-Net",
        "`enable_group_offload`, to disk",
        "two pipelines with the same parts, both fitted", "pipe.enable_model_cpu_offload",
        "change embeddings, interrupt, raise", "batches, generators, embeddings, latents",
        "weights, components and configurations read in between", "`enable_attention_slicing`",
        "`set_attention_backend`", "`enable_tiling` of the autoencoder", "U-Net compiled after (`compile`)",
        "two of the U-Net loaded before, one of them hot-swapped after", "scheduler replaced after, by five others",
    ),
}  # fmt: skip


def trials() -> list[object]:
    return [
        pytest.param(
            trial, way, id=f"{group}-{trial.name}-{way.name}",
            marks=() if trial.name in SOON[way.name] else pytest.mark.slow,
        )
        for group, tried in GROUPS.items()
        for trial in tried
        for way in WAYS.values()
        if way.name in trial.only
    ]  # fmt: skip


@pytest.mark.parametrize(("trial", "way"), trials())
def test_it_is_right_or_refused_by_name(trial: Trial, way: Way) -> None:
    found = outcome(trial, way)
    said = trial.refused.get(way.name)
    assert found == "right" if said is None else re.match(said, found, re.DOTALL), found


@pytest.mark.parametrize("name", ["level", pytest.param("budget", marks=pytest.mark.slow)])
def test_a_module_that_is_moved_to_its_own_device_brings_nothing_there(name: str) -> None:
    """diffusers does so as it loads adapters; whole networks went to the card, of which `live()` knew nothing."""
    way = WAYS[name]
    with way.ready():
        pipe = made(way.scale)
        fitted = way.fit(pipe)
        draw(pipe)
        card, weights = SimulatedDevice(), fitted.live().weights
        before = card.allocated_bytes()
        for part in (pipe.text_encoder, pipe.unet, pipe.vae):
            part.to(part.device)
            assert part.device == card.torch_device
            assert card.allocated_bytes() == before
        assert fitted.live().weights == weights <= before
        fitted.undo()
        assert {weight.device.type for weight in pipe.unet.parameters()} == {"cpu"}


def test_all_names_in_soon_are_trials() -> None:
    names = [trial.name for tried in GROUPS.values() for trial in tried]
    assert set().union(*SOON.values()) <= set(names)


def test_the_page_has_all_trials_with_their_outcomes() -> None:
    """A cell may say "–": a new trial that has not run yet."""

    def word(refusal: str | None) -> str:
        return "right" if refusal is None else refusal if refusal.startswith("raw ") else "refused"

    text = PAGE.read_text()
    for tried in GROUPS.values():
        for trial in tried:
            cells = [f"(–|{word(trial.refused.get(name))})" for name in WAYS]
            row = r" \| ".join([re.escape(trial.name), *cells])
            assert re.search(row, text), f"{trial.name}: run tools/make_together.py"
