"""What is caught when a wait is missing is still caught: 20 of those that the whole mutation test caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.devices.cuda_support import cuda_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card"),
    pytest.mark.skipif("STUB_TOTAL" not in os.environ, reason="needs a process whose card survives a fork"),
]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "test-cuda-mutants.jsonl"  # by `make test-cuda-full`
SAMPLE = 20


def test_a_sample_of_what_was_caught() -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "cuda_stub.mutants",
        "--sample",
        str(SAMPLE),
        "--caught",
        str(RESULTS),
    ]
    environment = os.environ | {"STUB_CARDS": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == SAMPLE
    assert [line for line in found if line["outcome"] != "caught"] == []
