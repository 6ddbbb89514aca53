"""Cards that torch cannot use, on the stand-in for CUDA (tests/cuda_stub), which plays them: the command line as it is.

A real card cannot play another one, so nothing of this runs on it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

STUB = hasattr(ctypes.CDLL(None), "stub_get")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not STUB, reason="a card that torch can use cannot play another")]

CARDS = {
    "driver": ({"STUB_OLD_DRIVER": "1"}, "the NVIDIA driver is too old for torch", "Update the driver, or install"),
    "Pascal": ({"STUB_CC": "60"}, "which has compute capability 6.0: only for", "Install torch for an older CUDA"),
    "Kepler": ({"STUB_CC": "37"}, "which has compute capability 3.7: only for", "Install torch for an older CUDA"),
}
SMALL = ["--height", "64", "--width", "64", "--steps", "2", "--seed", "1", "--level", "3", "--out", "fox.png"]


def ran(model: Path, card: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tightfit", "run", str(model), "a fox", *SMALL, *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | CARDS[card][0])


@pytest.mark.parametrize(("card", "device"), [*((card, "cuda,loopback") for card in CARDS), ("Pascal", None)])
def test_it_runs_without_a_card_that_torch_cannot_use_and_says_why(
    card: str, device: str | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ran(tiny_model, card, *(["--device", device] if device else []))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fox.png").exists()
    _, why, what = CARDS[card]
    said = " ".join(done.stderr.split())
    assert said.count("running without a card: ") == 1
    assert why in said
    assert what in said


@pytest.mark.parametrize("card", ["driver", "Pascal"])
def test_asked_for_by_name_it_is_refused_with_the_reason(
    card: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ran(tiny_model, card, "--device", "cuda")
    assert done.returncode != 0
    assert "no such device: cuda; this computer has 0 CUDA cards; " in " ".join(done.stderr.split())
    assert CARDS[card][1] in " ".join(done.stderr.split())
