"""One call: progress, pictures, and the report with the loading in front."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from tightfit import Fitted, Plan, Report, Request, Trace, fit
from tightfit.run.call_arguments import Prompt
from tightfit.run.generate import Result, generate, profiled, with_loading
from tightfit.schema.results import PhaseTrace, Sample
from tiny_pipelines import CASES

SMALL = Request(height=64, width=64, steps=3)


def pixels(result: Result) -> list[bytes]:
    return [picture.tobytes() for picture in result.pictures]


def test_progress_is_told_after_each_step(pipe: Any, fitted: Fitted) -> None:
    told: list[tuple[int, int]] = []
    result = generate(pipe, fitted, Prompt("a fox", 1), SMALL, lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [phase.name for phase in result.report.trace.phases] == ["encode", "denoise", "decode"]
    assert [picture.size for picture in result.pictures] == [(64, 64)]


def test_the_seed_decides_and_nothing_else(pipe: Any, fitted: Fitted) -> None:
    first = pixels(generate(pipe, fitted, Prompt("a fox", 1), SMALL))
    torch.rand(5)
    assert pixels(generate(pipe, fitted, Prompt("a fox", 1), SMALL, lambda done, total: None)) == first
    assert pixels(generate(pipe, fitted, Prompt("a fox", 2), SMALL)) != first


def test_videos_come_as_pictures_even_from_pipelines_that_make_arrays() -> None:
    pipe: Any = next(case for case in CASES if case.name == "Wan").make()
    fitted = fit(pipe, level=0, device="cpu")
    request = Request(height=32, width=32, frames=5, steps=1)
    (video,) = generate(pipe, fitted, Prompt("a fox", 1), request).pictures
    assert [type(frame) for frame in video] == [Image.Image] * 5
    assert video[0].size == (32, 32)


def test_mistakes_of_the_program_are_not_called_mistakes_of_the_user(
    pipe: Any, fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(pipe.scheduler, "step", broken)
    with pytest.raises(ValueError, match=r"^a bug$"):
        generate(pipe, fitted, Prompt("a fox", 1), SMALL)


def test_loading_becomes_the_first_phase_and_shifts_the_others() -> None:
    trace = Trace(
        call=4,
        seconds=3.0,
        phases=(
            PhaseTrace(name="encode", start=0.0, seconds=1.0, peak_bytes=50),
            PhaseTrace(name="denoise", start=1.0, seconds=2.0, peak_bytes=80, bytes_in=7, runs=5),
        ),
        samples=(Sample(seconds=0.5, weights=40, activations=1), Sample(seconds=2.5, weights=40, activations=40)),
        rss_peak_bytes=99,
        lossy=("fp8: unet",),
        notes=("a note",),
    )
    plan = Plan(level=2)
    longer = with_loading(Report(plan, trace), 10.0, 40)
    assert longer.plan is plan
    load, *rest = longer.trace.phases
    assert load == PhaseTrace(name="load", start=0.0, seconds=10.0, peak_bytes=40, peak_weights=40)
    assert [(phase.name, phase.start, phase.seconds) for phase in rest] == [
        ("encode", 10.0, 1.0),
        ("denoise", 11.0, 2.0),
    ]
    assert (rest[1].peak_bytes, rest[1].bytes_in, rest[1].runs) == (80, 7, 5)
    assert [(sample.seconds, sample.weights) for sample in longer.trace.samples] == [
        (0.0, 0), (10.0, 40), (10.5, 40), (12.5, 40),
    ]  # fmt: skip
    kept = ("call", "device", "rss_peak_bytes", "lossy", "notes")
    assert [getattr(longer.trace, name) for name in kept] == [getattr(trace, name) for name in kept]
    assert longer.trace.seconds == 13.0


def test_profiled_returns_what_was_made_and_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    made = Result([], with_loading(Report(Plan(), Trace(seconds=0.0, phases=())), 0.0, 0))

    def work() -> Result:
        torch.ones(8, 8) @ torch.ones(8, 8)
        return made

    result, table = profiled(work, rows=3)
    assert result is made
    assert "aten::" in table
    assert "Self CPU" in table
    assert capfd.readouterr().err == ""
