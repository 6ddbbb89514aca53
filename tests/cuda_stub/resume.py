"""pytest -p cuda_stub.resume --results FILE: only tests that have not passed yet with these sources and this torch.

A test's sources are the package, what all tests share, and its own file.

Each result is a line of JSON in FILE, so that hours of tests can be interrupted, and committed with what they are of.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = with_these_sources(config.getoption("--results"), lambda line: _file(line["test"]))
    names = {line["test"] for line in passed if line["outcome"] != "failed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


class _Writer:
    """Hears of all tests, whichever process they run in."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        of_what = sources_of(_file(report.nodeid))
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1), **of_what}
        if report.failed:
            line["error"] = str(report.longrepr).strip().splitlines()[-1][:300]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as results:
            results.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.getoption("--results")))


def with_these_sources(results: Path, file_of: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
    """The lines of `results` that are of the same sources and torch as are here."""
    lines: list[dict[str, Any]] = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    return [
        line for line in lines if all(line.get(key) == sources_of(file_of(line))[key] for key in ("sources", "torch"))
    ]


def _file(test: str) -> str:
    return test.partition("::")[0]


@functools.cache
def sources_of(file: str = "") -> dict[str, str]:
    """The commit; the sources of a test's `file`, which stay the same when others are committed; and torch."""
    paths = ["src", "tests/cuda_stub", ":(glob)tests/*.py", "tests/gpu/conftest.py", *([file] if file else [])]
    sources = _git("ls-files", "--stage", "--", *paths) + _git("diff", "--", *paths)
    return {
        "commit": _git("rev-parse", "--short", "HEAD").strip(),
        "sources": hashlib.sha256(sources.encode()).hexdigest()[:16],
        "torch": torch.__version__,
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
