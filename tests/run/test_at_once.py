"""Six commands at once on an empty cache, and commands that the system lets have little: pictures, or one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow

SMALL = ("--height", "64", "--width", "64", "--steps", "2", "--seed", "1", "--device", "loopback")
MIB = 2**20


def started(model: Path, name: str, *words: str, limits: Mapping[str, int] | None = None) -> subprocess.Popen[str]:
    """`tightfit run`, in a process that the system gives no more than `limits` of its resources."""
    enter = f"import resource as r\nfor name, most in {dict(limits or {})}.items():\n"
    enter += " r.setrlimit(getattr(r, name), (most, most))\n"
    program = f"{enter}from tightfit.__main__ import main\nmain()"
    command = [sys.executable, "-W", "ignore", "-c", program, "run", str(model), "a fox", *SMALL, "--out", name, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pixels(name: str) -> bytes:
    with Image.open(name) as picture:
        return picture.tobytes()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("here", "cache", "temporary"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


def test_six_processes_fill_an_empty_cache(tiny_model: Path, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(7)]
    together = [started(tiny_model, name, "--budget", "150MB") for name in names[:6]]
    for process in (*together, started(tiny_model, names[6], "--budget", "150MB")):  # the last one finds what they left
        _, err = process.communicate(timeout=600)
        assert (process.returncode, err) == (0, "")
    assert len({pixels(name) for name in names}) == 1
    assert sorted(os.listdir()) == names
    assert [*tmp_path.rglob(".tightfit-*"), *(tmp_path / "temporary").iterdir()] == []
    assert any((tmp_path / "cache" / "tightfit").rglob("*.json"))


LIMITS: dict[str, dict[str, int]] = {
    "address space": {"RLIMIT_AS": 1500 * MIB},
    "file size": {"RLIMIT_FSIZE": 1000},
    "open files": {"RLIMIT_NOFILE": 12},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_command_that_may_have_little(limit: str, tiny_model: Path, tmp_path: Path) -> None:
    """Exit code 0 and the picture, or another one and a line that says why; nothing is left."""
    process = started(tiny_model, "fox.png", "--level", "3", limits=LIMITS[limit])
    _, err = process.communicate(timeout=600)
    if process.returncode == 0:
        assert err == ""
        pixels("fox.png")
    else:
        last = err.splitlines()[-1]
        assert last.startswith("tightfit: ")
        assert "Error: " not in last[:60]
        assert "Traceback" not in err
        assert (limit == "file size") == (last == "tightfit: cannot write fox.png: File too large")
        assert os.listdir() == []
    assert [*tmp_path.rglob(".tightfit-*"), *(tmp_path / "temporary").iterdir()] == []
