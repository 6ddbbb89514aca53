"""Tests that need a process of their own call a function of their file in one, and read what it prints last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["started", "told"]

ROOT = Path(__file__).parents[1]


def started(file: str, function: str, **settings: str) -> subprocess.Popen[str]:
    """A process that calls `function` of a test's `file`, on one card of the stub, with these settings."""
    program = f"import sys; sys.path.insert(0, {str(Path(file).parent)!r}); import {Path(file).stem} as file"
    command = [sys.executable, "-W", "ignore", "-c", f"{program}; file.{function}()"]
    environment = os.environ | {"STUB_CARDS": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}", **settings}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it prints last, a line of JSON."""
    out, error = process.communicate("over\n", timeout=600)
    assert process.returncode == 0, error[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert not found.get("races")
    return found
