"""Runs in a control group whose limit is low, is lowered, or is taken by a neighbour: picture, refusal or kill.

One line for each in `bench/results/group-limits.jsonl`, which is gone on with: `bench/group_limits.py --count 60`.
As root, on Linux with memory cgroups of version 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from cage import Cage, caged

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "group-limits.jsonl"
MIB = 2**20
LEAST = 520 * MIB  # about what the least plan for the demo model names, in a group
MOST = 800 * MIB
DRAW = ["-m", "tightfit", "run", "a red circle", "--steps", "4", "--seed", "1", "--device", "cpu", "--out", "a.png"]
COMMANDS = {"level 0": [*DRAW, "--level", "0"], "budget": [*DRAW, "--ram", "800MiB"]}
KINDS = ["limit", "shrinks", "neighbour", "neighbour, at once"]
BALLAST = """
import sys, time
size, rate = map(int, sys.argv[1:])
pieces = []
while sum(map(len, pieces)) < size:
    pieces.append(b"x" * min(rate // 50, size))
    time.sleep(0.02)
time.sleep(600)
"""


def attempt(folder: Path, wanted: dict[str, bytes], choice: random.Random) -> dict[str, Any]:
    """One run in a group of its own, of a random command, kind, size and moment."""
    name, kind = choice.choice(list(COMMANDS)), choice.choice(KINDS)
    least, wait, rate = LEAST + choice.randint(-50, 100) * MIB, choice.uniform(0, 15), choice.randint(50, 200) * 10**6
    (folder / "a.png").unlink(missing_ok=True)
    with caged(least if kind == "limit" else MOST) as cage:
        run = cage.start([sys.executable, *COMMANDS[name]], folder / "said")
        ballast = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(0 if kind == "limit" else wait)
        if kind == "shrinks":
            shrink(cage, run, least, rate)
        elif kind != "limit" and run.poll() is None:
            size = MOST - least
            rate = size * 50 if "at once" in kind else rate
            ballast = cage.start([sys.executable, "-c", BALLAST, str(size), str(rate)], folder / "ballast")
        run.wait(300)
        if ballast is not None:
            ballast.kill()
            ballast.wait()
        kills = cage.kills
    row = {"command": name, "kind": kind, "least": least // MIB, "wait": round(wait, 1), "rate": rate // 10**6}
    said = (folder / "said.errors").read_text().splitlines()[-1:]
    row |= {"code": run.returncode, "kills": kills, "said": said[0][-300:] if said and run.returncode else ""}
    left = [*(folder / "tmp").rglob("*"), *folder.rglob(".tightfit-*")]
    row["left"] = {path.name: path.stat().st_size for path in left if path.is_file()}
    if run.returncode == 0:
        row["same"] = pixels(folder) == wanted[name]
    return row


def shrink(cage: Cage, run: subprocess.Popen[bytes], least: int, rate: int) -> None:
    """Lower the limit step by step, no faster than `rate`; the kernel refuses what it cannot free at once."""
    size = MOST
    while size > least and run.poll() is None:
        size = max(size - rate // 100, least)
        with contextlib.suppress(OSError):
            (cage.folder / "memory.limit_in_bytes").write_text(str(size))
        time.sleep(0.01)


def pixels(folder: Path) -> bytes:
    with Image.open(folder / "a.png") as picture:
        return picture.tobytes()


def trouble(row: dict[str, Any]) -> str | None:
    """What is wrong with a row, if anything. Who takes all at once may get the run killed."""
    if row["left"]:
        return "something was left"
    if row["kills"]:
        return "killed by one that takes all at once" if "at once" in row["kind"] else "killed"
    if row["code"] == 0:
        return None if row["same"] else "another picture"
    told = row["code"] == 3 and "MiB" in row["said"] and row["said"].startswith("tightfit: ")
    return None if told else f"exit code {row['code']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    wishes = parser.parse_args()
    choice, wanted = random.Random(time.time_ns()), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
        os.chdir(folder)
        for command, words in COMMANDS.items():
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
            wanted[command] = pixels(folder)
        for _ in range(wishes.count):
            row = attempt(folder, wanted, choice)
            with wishes.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in wishes.results.read_text().splitlines()]
    for what, times in collections.Counter(map(trouble, rows)).most_common():
        print(f"{times}: {what or 'clean'}")


if __name__ == "__main__":
    main()
