"""Commands that a signal ends at a random moment: what they say, what they leave, whether the next run is right.

One line for each in `bench/results/signals.jsonl`, which is gone on with: `python bench/signals.py --count 500`. Every
FIFTH time, the command runs undisturbed with the caches and folders that the signals before have left.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "signals.jsonl"
DRAW = ["run", "a red circle", "--steps", "2", "--seed", "1", "--device", "loopback", "--out", "out/a.png"]
DISK = {
    "components": {
        "unet": {"placement": "stream", "offload_to": "disk", "storage": "float8_e4m3fn"},
        "text_encoder": {"placement": "stream", "offload_to": "disk"},
        "vae": {"placement": "stream", "offload_to": "disk"},
    }
}
COMMANDS = {
    "run, disk": [*DRAW, "--plan", "disk.json"],
    "run, budget": [*DRAW, "--budget", "200MB"],
    "run, timeline": [*DRAW, "--level", "3", "--timeline", "out/t.png"],
    "plan": ["plan", "flux.1-dev", "--card", "rtx3060", "--budget", "8GB", "--timeline", "out/t.png"],
    "export": ["export", "--height", "64", "--width", "64", "--out", "out/d.exported"],
    "chart": ["chart", "--models", "sdxl", "--cards", "rtx3060", "--usual-only", "--out", "out/c.md"],
}
SIGNALS = ["SIGTERM", "SIGHUP", "SIGINT", "SIGTERM", "SIGKILL"]  # four of five have a handler
FIFTH = 5


class Lane:
    """A folder with caches, a temporary folder and outputs of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("cache", "tmp", "out"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "disk.json").write_text(json.dumps(DISK))
        self._wanted: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}

    def start(self, name: str) -> subprocess.Popen[str]:
        places = {"XDG_CACHE_HOME": "cache", "TMPDIR": "tmp", "HOME": "."}
        environment = os.environ | {variable: str(self._folder / place) for variable, place in places.items()}
        command = [sys.executable, "-m", "tightfit", *COMMANDS[name]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self._folder, env=environment, text=True, **pipes)

    def undisturbed(self, name: str) -> dict[str, Any]:
        """Run it to its end, and say whether it does what it did the first time."""
        begun = time.monotonic()
        with self.start(name) as process:
            out, err = process.communicate()
        if process.returncode:
            return {"command": name, "again": False, "code": process.returncode, "said": err[-300:]}
        found: Any = out
        if name.startswith("run"):
            with Image.open(self._folder / "out" / "a.png") as picture:
                found = picture.tobytes()
        if name == "export":
            found = (self._folder / "out" / "d.exported").read_bytes()
        self._seconds[name] = min(time.monotonic() - begun, self._seconds.get(name, 1e9))
        return {"command": name, "again": found == self._wanted.setdefault(name, found), "left": self.left()}

    def disturbed(self, name: str, which: str, share: float) -> dict[str, Any]:
        """Run it, and send the signal after a `share` of the time that it takes."""
        while name not in self._seconds:  # the first time it fills caches, and takes longer
            first = self.undisturbed(name)
            assert first["again"], first
            self.undisturbed(name)
        with self.start(name) as process:
            try:
                _, err = process.communicate(timeout=share * self._seconds[name])
            except subprocess.TimeoutExpired:
                process.send_signal(getattr(signal, which))
                _, err = process.communicate()
        own = [line for line in err.splitlines() if "tightfit: " in line]
        last = err.splitlines()[-1:] == own[-1:]
        row = {"command": name, "signal": which, "share": round(share, 3), "code": process.returncode}
        row |= {"lines": len(own), "last": last, "traceback": "Traceback" in err, "left": self.left()}
        return row | {"said": err[-500:]} if trouble(row) else row

    def left(self) -> dict[str, int]:
        """Files that should not be there, and their bytes."""
        found = [*(self._folder / "tmp").rglob("*"), *self._folder.rglob(".tightfit-*")]
        return {str(path.relative_to(self._folder)): path.stat().st_size for path in found if path.is_file()}


def trouble(row: dict[str, Any]) -> str | None:
    """What is wrong with a row, if anything."""
    if row["left"]:
        return "something was left"
    if "again" in row:
        return None if row["again"] else "the next run was wrong"
    number = int(getattr(signal, row["signal"]))
    if row["code"] == 0 or (row["code"] == -number and row["signal"] == "SIGKILL"):
        return None
    if row["code"] in (-number, 1) and row["lines"] == 0:
        return "before the first line of tightfit" if row["share"] < 0.05 else f"exit code {row['code']}"
    told = row["code"] == 128 + number and row["lines"] == 1 and row["last"] and not row["traceback"]
    return None if told else f"exit code {row['code']}, {row['lines']} lines, traceback: {row['traceback']}"


def attack(count: int, results: Path, seed: int) -> list[dict[str, Any]]:
    """Send `count` signals, and return all rows of `results`."""
    results.touch()
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        lane = Lane(Path(folder))
        for done in range(1, count + 1):
            name = choice.choice(list(COMMANDS))
            rows = [lane.disturbed(name, choice.choice(SIGNALS), choice.uniform(0, 1.1))]
            if done % FIFTH == 0:
                rows.append(lane.undisturbed(name))
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--results", type=Path, default=RESULTS)
    wishes = parser.parse_args()
    for name in SIGNALS[:3]:  # commands below nohup, or in the background of a shell, would ignore some
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    rows = attack(wishes.count, wishes.results, time.time_ns())
    for what, times in collections.Counter(map(trouble, rows)).most_common():
        print(f"{times}: {what or 'clean'}")


if __name__ == "__main__":
    main()
