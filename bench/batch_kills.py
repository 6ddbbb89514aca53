"""Batches on a Ray cluster whose workers are killed (SIGKILL) at random moments: is every picture right?

One line for each batch in `bench/results/batch-kills.jsonl`, which is gone on with, until there are as many kills:
`python bench/batch_kills.py --count 20`. Every batch goes to a folder of its own, and is run again at its end, when
nothing may be left to draw but what failed. Needs Ray.
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

import psutil
from PIL import Image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "batch-kills.jsonl"
REQUESTS, STEPS = 30, 20
MOST_KILLS = 6  # in one batch: a request that loses three workers counts as failed
OFFER = 200_000_000  # bytes of each node
LONGEST = 1200  # seconds of a batch: more is a hang
WORDS = ["--steps", str(STEPS), "--device", "loopback", "--budget", "60MB", "--json"]


class Place:
    """A folder with a tiny model, a file of requests, and what an undisturbed batch draws."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from tiny_pipelines import CASES

        self.folder = folder
        CASES[0].make().save_pretrained(folder / "model", safe_serialization=True)
        line = {"prompt": "a red fox", "height": 64, "width": 64}
        lines = [line | {"seed": seed, "name": f"fox-{seed}"} for seed in range(REQUESTS)]
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))

    def start(self, out: str, *words: str) -> subprocess.Popen[str]:
        asked = ["batch", "model", "prompts.jsonl", "--out", out, *WORDS, *words]
        environment = os.environ | {"XDG_CACHE_HOME": str(self.folder / "cache")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "tightfit", *asked], cwd=self.folder, env=environment, text=True, **pipes
        )

    def undisturbed(self) -> dict[str, bytes]:
        """Draw everything in one process."""
        with self.start("undisturbed") as process:
            out, err = process.communicate()
        assert process.returncode == 0, (out, err)
        return self.pixels("undisturbed")

    def pixels(self, out: str) -> dict[str, bytes]:
        """All pictures of a batch; a damaged one is an empty one."""
        found = {}
        for path in (self.folder / out).glob("*.png"):
            try:
                with Image.open(path) as picture:
                    found[path.name] = picture.tobytes()
            except (OSError, SyntaxError):
                found[path.name] = b""
        return found


def workers() -> list[psutil.Process]:
    """Processes of actors, on all nodes of this computer."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if "ray::BatchWorker" in " ".join(process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process)
    return found


class Killer:
    """Kills one worker after another, while it is started or while it draws, until a batch has lost MOST_KILLS."""

    def __init__(self, results: Path, choice: random.Random) -> None:
        self._results, self._choice = results, choice
        self.kills: list[dict[str, Any]] = []
        self._seen: set[int] = set()  # processes that were there at the last kill
        self._drawn = 0  # requests that were done at the last kill
        self._next()

    def _next(self) -> None:
        self._moment = self._choice.choice(("starting", "drawing"))
        self._delay = self._choice.uniform(0, 10 if self._moment == "starting" else 2)
        self._due: float | None = None

    def look(self) -> None:
        """Kill a worker if its moment has come."""
        found, drawn = workers(), self.drawn()
        new = [process for process in found if process.pid not in self._seen]
        if self._due is None and (new if self._moment == "starting" else drawn > self._drawn):
            self._due = time.monotonic() + self._delay
        if self._due is None or time.monotonic() < self._due or not found or len(self.kills) == MOST_KILLS:
            return
        killed = self._choice.choice(new if self._moment == "starting" and new else found)
        age = time.time() - killed.create_time()
        killed.kill()
        self.kills.append({"moment": self._moment, "age": round(age, 1), "drawn": drawn})
        self._seen, self._drawn = {process.pid for process in found}, drawn
        self._next()

    def drawn(self) -> int:
        return self._results.read_bytes().count(b"\n") if self._results.exists() else 0


def disturbed(place: Place, address: str, wanted: dict[str, bytes], name: str, choice: random.Random) -> dict[str, Any]:
    """Run a batch on the cluster while its workers are killed, and run it again."""
    begun = time.monotonic()
    killer = Killer(place.folder / name / "results.jsonl", choice)
    with place.start(name, "--ray-address", address) as process:
        while process.poll() is None and time.monotonic() - begun < LONGEST:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
                killer.look()
            time.sleep(0.05)
        hung = process.poll() is None
        if hung:
            process.kill()
        out, err = process.communicate()
    found, said = place.pixels(name), json.loads(out.splitlines()[-1]) if out.strip() else {}
    row = {"kills": killer.kills, "hung": hung, "code": process.returncode}
    row |= {"seconds": round(time.monotonic() - begun, 1), "drawn": said.get("drawn"), "failed": said.get("failed")}
    row |= {"lost": sum("was lost" in note for note in said.get("notes", []))}
    row |= {"damaged": sum(wanted[file] != content for file, content in found.items())}
    row |= {"missing": len(wanted) - len(found)}
    with place.start(name) as process:  # without Ray
        out, again_err = process.communicate()
    again = json.loads(out.splitlines()[-1]) if out.strip() else {}
    row |= {"again": [process.returncode, again.get("drawn"), again.get("done_before")]}
    row |= {"whole": place.pixels(name) == wanted}
    return row | ({"said": (err + again_err)[-500:]} if trouble(row) else {})


def trouble(row: dict[str, Any]) -> str | None:
    """What is wrong with a row, if anything."""
    if row["hung"]:
        return "it hung"
    if row["damaged"]:
        return "a damaged picture"
    if not row["whole"] or row["again"] != [0, row["missing"], REQUESTS - row["missing"]]:
        return "the next run did not complete it"
    if row["code"] or row["missing"]:
        return "not all requests were drawn at once"
    return None if row["kills"] else "nothing was killed"


def attack(count: int, results: Path, seed: int) -> list[dict[str, Any]]:
    """Run batches until `results` has `count` kills; return all rows."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    results.touch()
    choice = random.Random(seed)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    cluster = Cluster()
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder))
            wanted = place.undisturbed()
            assert len(wanted) == REQUESTS
            for _ in range(2):
                cluster.add_node(
                    num_cpus=1, object_store_memory=500 * 2**20, include_dashboard=False,
                    resources={"tightfit_bytes": OFFER},
                )  # fmt: skip
            while sum(len(row["kills"]) for row in rows) < count:
                rows.append(disturbed(place, str(cluster.address), wanted, f"out-{len(rows)}", choice))
                with results.open("a") as file:
                    file.write(f"{json.dumps(rows[-1])}\n")
    finally:
        cluster.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    wishes = parser.parse_args()
    rows = attack(wishes.count, wishes.results, time.time_ns())
    for what, times in collections.Counter(map(trouble, rows)).most_common():
        print(f"{times}: {what or 'clean'}")
    print(f"{sum(len(row['kills']) for row in rows)} kills")


if __name__ == "__main__":
    main()
