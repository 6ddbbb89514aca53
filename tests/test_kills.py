"""Processes that are killed at random moments: a few of each kind (`bench/kills.py`, whose results are committed)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "kills.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rank", "shard", pytest.param("ray", marks=needs_ray)])
def test_a_few_kills(kind: str, tmp_path: Path) -> None:
    results = tmp_path / "kills.jsonl"
    command = [sys.executable, "-W", "ignore", str(BENCH), "--kind", kind, "--count", "3", "--results", str(results)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {line.partition(" ")[2].lstrip("0123456789 ") for line in said} == {"clean", "kills"}, results.read_text()
