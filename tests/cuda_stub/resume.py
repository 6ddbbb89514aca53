"""pytest -p cuda_stub.resume --results FILE: only tests that have not passed yet with these sources and this torch.

Each result is a line of JSON in FILE, so that hours of tests can be interrupted, and committed with what they are of.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = _passed(config.getoption("--results"))
    done = [item for item in items if item.nodeid in passed]
    config.hook.pytest_deselected(items=done)
    items[:] = [item for item in items if item.nodeid not in passed]


class _Writer:
    """Hears of all tests, whichever process they run in."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1), **_of_what()}
        if report.failed:
            line["error"] = str(report.longrepr).strip().splitlines()[-1][:300]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as results:
            results.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.getoption("--results")))


def _passed(file: Path) -> set[str]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    here = _of_what()
    mine = [line for line in lines if all(line[key] == here[key] for key in ("sources", "torch"))]
    return {line["test"] for line in mine if line["outcome"] != "failed"}


@functools.cache
def _of_what() -> dict[str, str]:
    """The commit; its sources, which stay the same when only results are committed; and torch."""
    sources = _git("rev-parse", "HEAD:src", "HEAD:tests") + _git("diff", "HEAD", "--", "src", "tests")
    return {
        "commit": _git("rev-parse", "--short", "HEAD").strip(),
        "sources": hashlib.sha256(sources.encode()).hexdigest()[:16],
        "torch": torch.__version__,
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
