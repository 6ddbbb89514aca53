"""The steps of `make gpu-report`, and the page that is made of what they record."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"
MOST_FILES, MOST_SECONDS = 8, 480


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_report")


def test_steps_are_sound(report: ModuleType) -> None:
    every = report.steps()
    names = [step.name for step in every]
    assert len(set(names)) == len(names)
    assert all(0 < step.limit <= MOST_SECONDS for step in every)
    assert len({step.file for step in every}) <= MOST_FILES
    for step in every:
        module, _, function = step.run.partition(":")
        source = (BENCH / "gpu_report_steps" / f"{module}.py").read_text()
        assert f"\ndef {function}(record: Record, step: Step)" in source


def test_each_kind_of_step_has_a_dry_one(report: ModuleType) -> None:
    kinds = {(step.run, step.file) for step in report.steps()}
    dry = report.steps(dry=True)
    assert {(step.run, step.file) for step in dry} == kinds
    assert len(dry) == len({step.name.split()[0] for step in report.steps()})
    assert all(len(step.caps) <= 1 for step in dry)


def test_steps_are_chosen_by_the_beginnings_of_their_names(report: ModuleType) -> None:
    every = report.steps()
    assert {step.name.split()[0] for step in report.chosen(every, "peaks,rates", None)} == {"peaks", "rates"}
    assert "rivals sdxl" not in {step.name for step in report.chosen(every, None, "rivals sdxl")}


def recorded(report: ModuleType, folder: Path) -> None:
    """Results of a run in which one step failed and one was stopped."""
    steps = {step.name: step for step in report.steps(dry=True)}
    of = {"sources": "made up"}
    told = {
        "versions": ("done", [{"card": "a card", "torch": "2.13.0", "bytes": 2**34}], None),
        "tests": (
            "done",
            [
                {"test": "tests/gpu/a.py::b", "outcome": "passed", "seconds": 1.0},
                {"test": "tests/gpu/a.py::c", "outcome": "failed", "seconds": 1.0, "error": "it is wrong"},
            ],
            None,
        ),
        "rates": ("failed", [{"rate": "memory_rate", "measured": 9e11, "clock": 8e11}], "RuntimeError: no kernel"),
        "caps sd-1.5": ("stopped after 8 minutes", [{"contender": "tightfit", "cap": 2, "model": "sd-1.5",
                                                     "request": "512×512", "call": 1.5, "peak": 2**30}], None),
    }  # fmt: skip
    for name, (status, rows, error) in told.items():
        record = {"status": status, "of": of, "rows": rows, "error": error, "seconds": 12.0}
        report.write_record(folder / steps[name].file, name, record)


def test_a_page_says_what_was_measured_and_what_was_not(report: ModuleType, tmp_path: Path) -> None:
    recorded(report, tmp_path / "results")
    report.write_page(tmp_path / "results", tmp_path, dry=True)
    said = (tmp_path / "gpu-report.md").read_text()
    assert "stub's card" in said
    assert (
        "| rates | link, launch and arithmetic rates, and the catalog's | failed: RuntimeError: no kernel | 12 |"
        in said
    )
    assert "stopped after 8 minutes" in said
    assert "1 failed, 1 passed." in said
    assert "- `tests/gpu/a.py::c`: it is wrong" in said
    assert "| memory_rate | 838 GiB/s | – | 745 GiB/s |" in said
    assert "| tightfit | 2 GB | 1.5 s | 1 GiB |" in said
    assert "| sanitizer | torch's race detector on a tiny FLUX | not run yet | – |" in said
    assert (tmp_path / "gpu-report.png").stat().st_size > 1000
    assert "(gpu-report.png)" in said


def test_the_page_is_that_of_the_results(report: ModuleType, tmp_path: Path) -> None:
    report.write_page(report.RESULTS, tmp_path, dry=False)
    assert (report.PAGES / "gpu-report.md").read_text() == (tmp_path / "gpu-report.md").read_text(), "run --page"


def test_what_is_done_for_the_same_code_and_card_stays(report: ModuleType, tmp_path: Path) -> None:
    recorded(report, tmp_path)
    every = report.steps(dry=True)
    left = [step.name for step in report.in_order(every, tmp_path, {"sources": "made up"}, again=False)]
    assert not {"versions", "tests"} & set(left)
    assert left[-2:] == ["rates", "caps sd-1.5"]  # after those that never ran
    other = [step.name for step in report.in_order(every, tmp_path, {"sources": "other"}, again=False)]
    assert set(other) == {step.name for step in every}
