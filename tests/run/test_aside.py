"""A process of its own: the same answers, the same errors, and a clear word where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit import InputError, RunError, measure_footprint
from tightfit.run.aside import aside
from tightfit.run.stage import roomy_card
from tiny_pipelines import CASES


@pytest.fixture
def _beside_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


@pytest.mark.parametrize("name", ["StableDiffusion", "Flux", "Wan"])
def test_a_live_pipeline_is_measured_in_another_process_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = {key: value for key, value in case.call().items() if key != "output_type"}
    here = measure_footprint(case.make(), inputs=inputs)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        assert measure_footprint(case.make(), inputs=inputs) == here


def fail(name: str) -> None:
    raise InputError(f"no {name}", name=name)


def talk() -> str:
    print("this is no answer")
    return f"{roomy_card.__module__} {torch.accelerator.is_available()}"


@pytest.mark.usefixtures("_beside_a_card")
def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(InputError, match="no milk") as caught:
        aside(fail, "milk")
    assert caught.value.facts == {"name": "milk"}
    assert aside(talk) == "tightfit.run.stage False"


@pytest.mark.usefixtures("_beside_a_card")
def test_what_cannot_be_handed_over_is_told() -> None:
    def local(value: Any) -> Any:
        return value

    with pytest.raises(RunError, match="this cannot be measured beside cuda: "):
        aside(local, 3)
