"""The tests in tests/gpu, whose outcomes are rows; those that passed before with the same code are not run again."""

from __future__ import annotations

from typing import Any

import pytest

from cuda_stub import driver
from gpu_report_steps.plan import Step
from gpu_report_steps.records import ROOT, Record

__all__ = ["gpu_tests"]

IN_DRY = "test_cuda_layouts or test_cuda_engines"  # a few seconds of each kind


class _Rows:
    """Writes the outcome of each test."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = {row["test"] for row in self.record.rows if row["outcome"] != "failed"}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]
        names = {item.nodeid for item in items}
        self.record.rows = [row for row in self.record.rows if row["test"] not in names]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.failed:
            row["error"] = str(report.longrepr).strip().splitlines()[-1][:300]
        self.record.add(**row)


def gpu_tests(record: Record, step: Step) -> None:
    chosen = ["-m", "gpu and not full", "-p", "no:cacheprovider", "-W", "ignore:invalid escape sequence"]
    if driver.loaded():
        chosen += ["-p", "cuda_stub.plugin", "-k", IN_DRY]
    code = pytest.main([str(ROOT / "tests" / "gpu"), "--rootdir", str(ROOT), *chosen], plugins=[_Rows(record)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code}")
