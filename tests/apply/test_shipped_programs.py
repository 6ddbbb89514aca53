"""The programs that come with the package: read instead of exported, for what known models usually do."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

from tightfit.apply.activations.strips import called_program
from tightfit.apply.activations.strips.graph_cache import SHIPPED, mark_of_makers
from tightfit.apply.activations.strips.program import Program
from tightfit.catalog.known import model_names
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.simulate import SimulationRun
from tightfit.run.strip_profiles import AutoencoderStripProfiles
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.request import Request

FOLDER = Path(str(files("tightfit"))) / SHIPPED
MADE = json.loads((FOLDER / "made.json").read_text())


def test_they_were_made_by_the_code_that_is_here() -> None:
    assert MADE["by"] == mark_of_makers(), "run tools/make_programs.py: what makes programs has changed"


def test_every_known_model_has_some_and_they_take_little() -> None:
    assert MADE["programs"].keys() == set(model_names())
    marks = {mark for programs in MADE["programs"].values() for mark in programs.values()}
    assert {file.stem for file in FOLDER.glob("*.zip")} == marks
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5e6


@pytest.mark.skipif(
    any(version(name).partition("+")[0] != MADE[name] for name in ("torch", "diffusers")),
    reason="they are for other versions of torch and diffusers",
)
@pytest.mark.parametrize("model", ["sd-1.5"])
def test_nothing_is_exported_for_a_usual_call(
    model: str, new_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Program:
        raise AssertionError("exported")

    monkeypatch.setenv("XDG_CACHE_HOME", str(new_cache() / "none"))
    monkeypatch.setattr(called_program, "capture", refuse)
    with unlimited_card(ANY_CARD) as card, ExitStack() as undo:
        stage = SimulationRun(model, card, {"level": 0}, Request())
        calls = AutoencoderStripProfiles(stage.components, undo, expandable=True)
        stage.run(None)
        marks = {".".join(kind): survey and survey.mark for kind, survey in calls.profilers().items()}
        assert marks == MADE["programs"][model]
