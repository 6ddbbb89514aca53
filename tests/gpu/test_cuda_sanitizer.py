"""torch's own race detector has nothing to report, and reports a wait that is missing.

In processes of their own, because it stays switched on; importing it is enough for torch to call its hooks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_stub import driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.loaded(), reason="needs the stub of a card"),
]

ROOT = Path(__file__).parents[2]
NAMES = "StableDiffusion", "StableDiffusionXL", "Flux", "Wan"


def reports(*words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "cuda_stub.sanitize", *words]
    environment = os.environ | {"STUB_CARDS": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("StableDiffusion", ("page-locked", "on disk")),
        *(pytest.param(name, (), marks=pytest.mark.full) for name in NAMES),
    ],
    ids=lambda value: value if isinstance(value, str) else "two plans" if value else "all plans",
)
def test_nothing_is_reported(name: str, plans: tuple[str, ...]) -> None:
    found = reports(name, *(["--plan", *plans] if plans else []))
    assert len(found) == (len(plans) or 8)
    assert [each for each in found if each["reports"] or not each["same"]] == []


def test_a_missing_wait_is_reported() -> None:
    words = "Flux", "--without", "_CudaCopy.wait_on_device", "--plan", "page-locked", "level 0"
    found = {each["plan"]: each["reports"] for each in reports(*words)}
    assert found["page-locked"]
    assert not found["level 0"]
