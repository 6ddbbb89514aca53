"""What would happen: rehearsed steps are those of a whole run, and answers are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tightfit import fit
from tightfit.catalog.cuda import CONTEXT
from tightfit.catalog.known import known_card
from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.loading import load_pipeline
from tightfit.cli import app
from tightfit.files import cache_folder
from tightfit.run import answer_cache as predictions
from tightfit.run import simulate as rehearsal
from tightfit.run import simulate as stage
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.pass_replay import PassReplayer
from tightfit.run.simulate import simulate_call
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.request import Request
from tightfit.schema.results import Prediction
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

QUESTION = ("plan", "sd-1.5", "--card", "rtx3060", "--steps", "2", "--json")


@pytest.fixture(autouse=True)
def _own_cache(new_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(new_cache()))


def tightfit_(*words: str) -> Any:
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("level", [0, 3])
def test_steps_that_are_not_worked_through_are_like_those_that_are(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short = simulate_call("sd-1.5", known_card("rtx3060"), {"level": level}, Request(steps=5, height=256, width=256))
    monkeypatch.setattr(PassReplayer, "__call__", lambda self, *args, **kwargs: self._forward(*args, **kwargs))
    whole = simulate_call("sd-1.5", known_card("rtx3060"), {"level": level}, Request(steps=5, height=256, width=256))
    assert short.fits
    for quick, full in zip(short.trace.phases, whole.trace.phases, strict=True):
        assert quick.seconds == pytest.approx(full.seconds, rel=1e-3)
        assert (quick.name, quick.runs, quick.bytes_in, quick.bytes_out) == (
            full.name, full.runs, full.bytes_in, full.bytes_out,
        )  # fmt: skip
        assert (quick.peak_bytes, quick.peak_weights) == (full.peak_bytes, full.peak_weights)
        assert quick.peak_reserved == full.peak_reserved


def test_what_is_remembered_of_one_call_is_no_part_of_the_next() -> None:
    """The denoiser's weights come again: a text encoder was there in between."""
    plan = {"components": {"text_encoder": {"placement": "offload"}, "unet": {"placement": "offload"}}}
    with unlimited_card(known_card("rtx3060")) as card:
        tried = stage.SimulationRun("sd-1.5", card, plan, Request(steps=4, height=256, width=256))
        moved = []
        for _ in range(3):
            tried.run()
            moved.append(sum(phase.bytes_in for phase in tried.fitted.report().trace.phases))
    assert moved[1] == moved[2]
    assert moved[0] == pytest.approx(moved[1], rel=0.01)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_call_runs_on_a_card_of_what_it_needs_and_a_smaller_one_is_full(level: int) -> None:
    rtx3060, asked = known_card("rtx3060"), Request(steps=4, height=256, width=256)
    told = simulate_call("sd-1.5", rtx3060, {"level": level}, asked)
    assert told.trace.peak_bytes <= told.needed_bytes <= told.peak_reserved
    for size, fits in ((told.needed_bytes, True), (told.needed_bytes - 2**21, False)):
        card = SimulatedCard(0, rtx3060.model_copy(update={"bytes": size}), Host())
        use_cards([card])
        call = stage.SimulationRun("sd-1.5", card, {"level": level}, asked)
        try:
            call.run()
            notes = call.fitted.report().trace.notes  # where a card is full, resident weights are streamed from then on
            full = any("out of memory" in note for note in notes)
        except torch.OutOfMemoryError:
            full = True
        assert full is not fits
        smaller = rtx3060.model_copy(update={"bytes": size + CONTEXT})
        assert simulate_call("sd-1.5", smaller, {"level": level}, asked).fits is fits


@pytest.mark.one_in(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_folder_without_its_weights_is_predicted_as_it_runs(level: int, tiny_model: Path) -> None:
    folder = check_folder(tiny_model)
    asked = Request(steps=3, height=64, width=64, batch=2)
    told = simulate_call(folder, known_card("rtx3060"), {"level": level}, asked)
    card = SimulatedCard(0, known_card("rtx3060"), Host(), values="shapes")
    use_cards([card])
    pipe = load_pipeline(folder, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    fitted = fit(pipe, level=level, request=asked, device="simulated:0")
    with torch.no_grad():
        pipe(**call_arguments(pipe, Prompt("a prompt", 0), asked), output_type="pt")
    for told_phase, phase in zip(told.trace.phases, fitted.report().trace.phases, strict=True):
        assert (told_phase.name, told_phase.runs) == (phase.name, phase.runs)
        assert (told_phase.bytes_in, told_phase.bytes_out) == (phase.bytes_in, phase.bytes_out)
        assert told_phase.peak_weights == phase.peak_weights
        assert told_phase.peak_bytes == phase.peak_bytes
        assert told_phase.seconds == pytest.approx(phase.seconds, rel=0.01)  # its third pass is remembered


def test_qwen_image_guides_with_a_second_pass_in_each_step() -> None:
    told = simulate_call("qwen-image", known_card("rtx4090"), {"level": 0}, Request(height=256, width=256, steps=2))
    assert [phase.runs for phase in told.trace.phases if phase.name == "denoise"] == [4]


def test_what_a_pipeline_does_to_its_own_autoencoder_is_no_remark_about_the_call() -> None:
    """SDXL widens it for the decode, and diffusers warns whoever does so."""
    told = simulate_call("sdxl", known_card("rtx4090"), {"level": 2}, Request(height=256, width=256, steps=2))
    assert not [note for note in told.trace.notes if "float32" in note]


def test_left_out_the_model_is_the_demo_model() -> None:
    result = tightfit_("plan", "--card", "rtx3060", "--level", "3", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("the demo model, 20 steps, float16, on rtx3060: fits, ")
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["lossless"] is True  # level 3 allows tiles, but not for pictures as small as these
    assert [phase["runs"] for phase in told["phases"]] == [2, 20, 1]  # as tightfit run asks it


def test_the_command_says_by_phase_what_would_happen_and_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tightfit_(*QUESTION)
    assert first.exit_code == 0, first.stderr
    assert first.stdout.startswith("sd-1.5, 512×512, 2 steps, float16, on rtx3060: fits, ")
    told = json.loads(first.stdout.splitlines()[-1])
    assert [phase["name"] for phase in told["phases"]] == ["encode", "denoise", "decode"]
    assert told["fits"] is True
    assert told["predicted"]["peak_bytes"] == max(phase["predicted_peak_bytes"] for phase in told["phases"])
    monkeypatch.setattr(rehearsal, "simulate_call", None)
    assert tightfit_(*QUESTION).stdout == first.stdout


SMALL = ("--steps", "2", "--height", "256", "--width", "256", "--json")


def test_a_budget_is_planned_for_and_played() -> None:
    result = tightfit_("plan", "sd-1.5", "--card", "rtx3060", "--budget", "1GB", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "- unet is streamed, " in result.stdout
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["fits"] is told["lossless"] is True
    assert told["capacity_bytes"] == 10**9
    assert told["predicted"]["peak_bytes"] <= told["predicted"]["peak_reserved_bytes"] <= 10**9
    played = {phase["name"]: phase["seconds"] for phase in told["phases"]}
    planned = {phase["name"]: phase["seconds"] for phase in told["plan"]["forecast"]}
    assert planned["denoise"] == pytest.approx(played["denoise"], rel=0.03)


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    result = tightfit_("plan", "sd-1.5", "--card", "rtx3060", "--budget", "100MB", *SMALL)
    assert result.exit_code == 3
    assert "StableDiffusionPipeline cannot do 256×256 within 95.4 MiB" in result.stderr
    told = json.loads(result.stdout.splitlines()[-1])["error"]
    assert told["type"] == "BudgetTooSmall"
    again = tightfit_("plan", "sd-1.5", "--card", "rtx3060", "--budget", str(told["needed_bytes"]), *SMALL)
    assert again.exit_code == 0, again.stderr


def test_what_does_not_fit_says_what_it_needs() -> None:
    result = tightfit_("plan", "pixart-sigma", "--card", "gtx1650", "--level", "0", "--steps", "2", "--json")
    assert result.exit_code == 3
    assert "does not fit, it needs " in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["fits"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flux.1-dve", "--card", "rtx4090"), "unknown model in the catalog 'flux.1-dve': did you mean 'flux.1-dev'?"),
        (("sdxl", "--card", "rtx4909"), "unknown card 'rtx4909': did you mean 'rtx4090'?"),
        (
            ("sdxl", "--card", "rtx4090", "--budget", "8GB", "--level", "2"),
            "leave out what else decides about it (level)",
        ),
        (("sdxl", "--card", "rtx4090", "--level", "1", "--allow", "fp8"), "--allow fp8 goes with a budget"),
        (("sdxl", "--card", "rtx4090", "--level", "9"), "level must be less than or equal to 3, not 9"),
        (("sdxl", "--card", "rtx4090", "--frames", "9"), "StableDiffusionXLPipeline takes no frames"),
        (("sdxl", "--card", "rtx4090", "--height", "1001"), "height 1001 is not a multiple of 8"),
    ],
)
def test_wrong_questions_get_one_line(words: tuple[str, ...], message: str) -> None:
    result = tightfit_("plan", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_broken_answer_is_asked_for_again() -> None:
    question = {"model": "x"}
    asked = []

    def answer() -> Prediction:
        asked.append(1)
        return simulate_call("sd-1.5", known_card("rtx3060"), {"level": 0}, Request(steps=1, height=64, width=64))

    first = predictions.cached(Prediction, question, answer)
    assert predictions.cached(Prediction, question, answer) == first
    (file,) = (cache_folder() / "predictions").iterdir()
    file.write_text(file.read_text()[:100])
    assert predictions.cached(Prediction, question, answer) == first
    assert len(asked) == 2


def test_an_autoencoder_that_is_widened_while_it_is_away_is_only_a_shape() -> None:
    """Stable Diffusion XL's goes to float32 in the middle of a call; its biases have numbers, its kernels have not."""
    asked = Request(height=256, width=256, steps=1)
    predicted = simulate_call("sdxl", known_card("rtx3060"), {"level": 3}, asked)
    assert [phase.name for phase in predicted.trace.phases] == ["encode", "denoise", "decode"]
