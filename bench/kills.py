"""SIGKILL at random moments, to a rank of two, to `tightfit shard`, to workers of a batch on Ray: what is left behind?

One line for each undertaking in `bench/results/kills.jsonl`, which is gone on with until there are as many kills of
each kind: `python bench/kills.py --count 20`, or of one: `--kind rank`, `shard` or `ray`. What was killed is run again
each time, and must complete what is missing. All with a tiny pipeline; `ray` needs Ray.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "kills.jsonl"
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
Row = dict[str, Any]

GRACE = 30  # seconds after a kill in which the other rank has to end
HUNG = 100  # seconds after which it is killed, too: one that has not begun is waited for, for 60 s
DRAW = ["a fox", "--height", "64", "--width", "64", "--steps", "10", "--seed", "3", "--device", "cpu"]
LAUNCHERS = {  # how two ranks are started, and how far they follow a plan
    "torchrun, budget": ["--budget", "2GB"],
    "torchrun, level": ["--level", "2"],
    "processes, budget": ["--budget", "2GB"],
    "processes, level": ["--level", "2"],
}

SHARD = ["--max-shard-size", "20kB"]
LOOKS = """
import json, sys
from pathlib import Path
import tightfit
from tightfit.run.shard import verify_model
from tightfit.checkpoint.folder import check_folder
taken = []
for folder in map(Path, sys.argv[1:]):
    for name, look in {"load": lambda at: tightfit.load(str(at), level=0, device="cpu"), "plan": check_folder,
                       "verify": verify_model}.items():
        try:
            look(folder)
        except tightfit.TightfitError:
            continue
        taken.append(f"{name} {folder.name}")
print(json.dumps(taken))
"""

REQUESTS, STEPS = 30, 20
MOST_KILLS = 6  # in one batch: a request that loses three workers counts as failed
OFFER = 200_000_000  # bytes of each node
LONGEST = 1200  # seconds of a batch: more is a hang
BATCH = ["--steps", str(STEPS), "--device", "loopback", "--budget", "60MB", "--json"]


class Place:
    """A folder with a tiny model, caches and a temporary folder of its own; commands run in it."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from tiny_pipelines import CASES

        self.folder = folder
        (folder / "tmp").mkdir()
        CASES[0].make().save_pretrained(folder / "model", safe_serialization=True)

    def start(self, words: list[str], **variables: str) -> subprocess.Popen[str]:
        places = {"XDG_CACHE_HOME": str(self.folder / "cache"), "TMPDIR": str(self.folder / "tmp")}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | places | variables
        return subprocess.Popen([sys.executable, *words], cwd=self.folder, env=environment, **PIPES)

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run a command undisturbed; return its exit code, stdout and stderr."""
        with self.start(list(words)) as process:
            out, err = process.communicate()
        return process.returncode, out, err

    def unfinished(self) -> list[str]:
        """Files without their last name."""
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob(".tightfit-*")]

    def pixels(self, out: str) -> dict[str, bytes]:
        """All pictures of a folder; a damaged one is an empty one."""
        found = {}
        for path in (self.folder / out).glob("*.png"):
            try:
                with Image.open(path) as picture:
                    found[path.name] = picture.tobytes()
            except (OSError, SyntaxError):
                found[path.name] = b""
        return found


def tightfit_lines(said: str) -> list[str]:
    return [line[line.index("tightfit: ") :] for line in said.splitlines() if "tightfit: " in line]


class Ranks:
    """Kills one of two ranks that draw one picture."""

    def __init__(self, place: Place, choice: random.Random) -> None:
        self._place, self._choice = place, choice
        self._seconds: dict[str, float] = {}
        (place.folder / "ranks").mkdir()
        code, _, err = place.run("-m", "tightfit", "run", "model", *DRAW, "--level", "0", "--out", "ranks/alone.png")
        assert code == 0, err
        self._wanted = place.pixels("ranks").pop("alone.png")
        (place.folder / "ranks" / "alone.png").unlink()

    def row(self) -> Row:
        how, rank = self._choice.choice(list(LAUNCHERS)), self._choice.randrange(2)
        while how not in self._seconds:  # the first time it fills caches, and takes longer
            for _ in range(2):
                again = self._undisturbed(how)
                assert again["whole"], again
        share = self._choice.uniform(0, 1)
        with self._started(how) as processes:
            time.sleep(share * self._seconds[how])
            killed = self._ranks(processes).get(rank)
            if killed is None or len(self._ranks(processes)) < 2:
                return {}  # one has ended
            killed.kill()
            began, hung = time.monotonic(), False
            while any(process.poll() is None for process in processes):
                if time.monotonic() - began > HUNG:
                    hung = True
                    break
                time.sleep(0.05)
            seconds = time.monotonic() - began
            if hung:
                for process in (*self._ranks(processes).values(), *processes):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            said = [process.communicate() for process in processes]
        torchrun = how.startswith("torchrun")
        survivor = processes[0 if torchrun else 1 - rank]  # torchrun ends with an error if one rank does
        row = {"how": how, "rank": rank, "share": round(share, 3), "hung": hung, "seconds": round(seconds, 1)}
        row |= {"code": survivor.returncode, "said": tightfit_lines("".join(err for _, err in said))}
        row |= {"picture": self._picture(), "left": self._left()}
        if rank_trouble({"again": [0, True], **row}):
            row["errors"] = "".join(err for _, err in said)[-3000:]
        again = self._undisturbed(how)
        return row | {"again": [again["code"], again["whole"]]}

    def _undisturbed(self, how: str) -> Row:
        begun = time.monotonic()
        with self._started(how) as processes:
            said = [process.communicate() for process in processes]
        self._seconds[how] = min(time.monotonic() - begun, self._seconds.get(how, 1e9))
        codes = [process.returncode for process in processes]
        return {"code": max(codes, key=abs), "whole": self._picture() == "whole", "said": said}

    @contextlib.contextmanager
    def _started(self, how: str) -> Iterator[list[subprocess.Popen[str]]]:
        (self._place.folder / "ranks" / "a.png").unlink(missing_ok=True)
        run = ["-m", "tightfit", "run", "model", *DRAW, *LAUNCHERS[how], "--out", "ranks/a.png"]
        if how.startswith("torchrun"):
            processes = [self._place.start(["-m", "torch.distributed.run", "--nproc-per-node", "2", *run])]
        else:
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
            processes = [
                self._place.start(run, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **common)
                for rank in range(2)
            ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()

    def _ranks(self, processes: list[subprocess.Popen[str]]) -> dict[int, psutil.Process]:
        """Processes of ranks that have not ended: those started, or their children."""
        found = {}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                started = psutil.Process(process.pid)
                for each in (started, *started.children()):
                    with contextlib.suppress(psutil.Error):
                        number = each.environ().get("RANK")
                        if number is not None and each.status() != psutil.STATUS_ZOMBIE:
                            found[int(number)] = each
        return found

    def _picture(self) -> str:
        """What is in the folder: no picture, that of one process, or another."""
        found = self._place.pixels("ranks").get("a.png")
        if found is None:
            return "none"
        if len(found) != len(self._wanted):
            return "damaged"
        one, other = (np.frombuffer(each, np.uint8).astype(np.int16) for each in (found, self._wanted))
        return "whole" if np.abs(one - other).max() <= 1 else "another"  # 1e-5 may round a pixel differently

    def _left(self) -> list[str]:
        names = {path.name for path in (self._place.folder / "ranks").iterdir()} - {"a.png"}
        return [*names, *self._place.unfinished()]


def rank_trouble(row: Row) -> str | None:
    late = not any("did not begin" in line for line in row["said"])  # then it is waited for as long as it may take
    done = (
        row["how"].startswith("torchrun") and row["picture"] == "whole" and not row["said"]
    )  # but for its last moments
    wrong = {
        "it hung": row["hung"],
        f"the other one ended after {row['seconds']} s": row["seconds"] > GRACE and late,
        f"{row['picture']} picture": row["picture"] not in ("none", "whole"),
        "something was left": row["left"],
        "the next run did not draw it": row["again"] != [0, True],
        f"exit code {row['code']}": row["code"] < 0,
        "no error, and no picture": row["code"] == 0 and (row["picture"] != "whole" or row["said"]),
        f"{len(row['said'])} lines": row["code"] > 0 and len(row["said"]) != 1 and not done,
    }
    return next((what for what, found in wrong.items() if found), None)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Shards:
    """Kills `tightfit shard`: at any moment, or while it writes."""

    def __init__(self, place: Place, choice: random.Random) -> None:
        self._place, self._choice = place, choice
        begun = time.monotonic()
        code, _, err = self._sharded("wanted")
        assert code == 0, err
        self._seconds = time.monotonic() - begun
        self._wanted = self._content("wanted")
        self._weights = self._tensors("model")
        assert self._tensors("wanted") == self._weights

    def row(self) -> Row:
        moment = self._choice.choice(("any", "writing"))
        part, whole = self._place.folder / "dst.part", self._place.folder / "dst"
        files = len(self._wanted)
        when = self._choice.uniform(0, self._seconds) if moment == "any" else self._choice.randrange(files)
        with self._place.start(["-m", "tightfit", "shard", "model", "dst", *SHARD]) as process:
            begun = time.monotonic()
            while process.poll() is None:
                if moment == "any" and time.monotonic() - begun >= when:
                    break
                if moment == "writing" and sum(1 for _ in part.rglob("*.safetensors")) >= when:
                    break
                time.sleep(0.0005 if moment == "writing" else 0.01)
            killed = process.poll() is None
            process.kill()
            process.communicate()
        row = {"moment": moment, "at": round(when, 2), "seconds": round(time.monotonic() - begun, 1)}
        row |= {"killed": killed, "there": whole.exists(), "part": len(self._content("dst.part"))}
        code, out, err = self._place.run("-c", LOOKS, "dst", "dst.part")
        row |= {"taken": json.loads(out.splitlines()[-1]) if code == 0 else err[-500:]}
        row |= {"damaged": whole.exists() and self._content("dst") != self._wanted}
        code, out, err = self._sharded("dst")
        same = self._content("dst") == self._wanted and self._tensors("dst") == self._weights
        row |= {"again": [code, same], "kept": "were finished before" in out, "left": self._place.unfinished()}
        shutil.rmtree(whole, ignore_errors=True)
        shutil.rmtree(part, ignore_errors=True)
        return row if killed else {}

    def _sharded(self, target: str) -> tuple[int, str, str]:
        return self._place.run("-m", "tightfit", "shard", "model", target, *SHARD)

    def _content(self, folder: str) -> dict[str, bytes]:
        at = self._place.folder / folder
        return {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*") if path.is_file()}

    def _tensors(self, folder: str) -> dict[str, bytes]:
        """Bytes of each tensor of each network."""
        from safetensors.torch import load_file

        at, found = self._place.folder / folder, {}
        for path in at.rglob("*.safetensors"):
            for name, tensor in load_file(path).items():
                found[f"{path.parent.relative_to(at)}: {name}"] = tensor.numpy().tobytes()
        return found


def shard_trouble(row: Row) -> str | None:
    expected = {f"{look} dst" for look in ("load", "plan", "verify")} if row["there"] else set()
    if row["damaged"]:
        return "a damaged folder"
    if set(row["taken"]) != expected:
        return f"an unfinished folder is taken for whole: {row['taken']}"
    if row["left"]:
        return "something was left"
    return None if row["again"] == [0, True] else "the next run did not complete it"


class RayBatches:
    """Kills workers of a batch on a cluster of two nodes, one after another, and runs it again without Ray."""

    def __init__(self, place: Place, choice: random.Random, most_kills: int = MOST_KILLS) -> None:
        self._place, self._choice, self._most_kills = place, choice, most_kills
        self._done = 0
        line = {"prompt": "a red fox", "height": 64, "width": 64}
        lines = [line | {"seed": seed, "name": f"fox-{seed}"} for seed in range(REQUESTS)]
        (place.folder / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        with self._started("undisturbed") as process:
            said = process.communicate()
        assert process.returncode == 0, said
        self._wanted = place.pixels("undisturbed")
        assert len(self._wanted) == REQUESTS
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        for _ in range(2):
            self._cluster.add_node(
                num_cpus=1, object_store_memory=500 * 2**20, include_dashboard=False,
                resources={"tightfit_bytes": OFFER},
            )  # fmt: skip

    def close(self) -> None:
        self._cluster.shutdown()

    def row(self) -> Row:
        begun, name = time.monotonic(), f"batch-{self._done}"
        self._done += 1
        killer = Killer(self._place.folder / name / "results.jsonl", self._choice, self._most_kills)
        with self._started(name, "--ray-address", str(self._cluster.address)) as process:
            while process.poll() is None and time.monotonic() - begun < LONGEST:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
                    killer.look()
                time.sleep(0.05)
            hung = process.poll() is None
            if hung:
                process.kill()
            out, err = process.communicate()
        found, said = self._place.pixels(name), json.loads(out.splitlines()[-1]) if out.strip() else {}
        row = {"kills": killer.kills, "hung": hung, "code": process.returncode}
        row |= {"seconds": round(time.monotonic() - begun, 1), "drawn": said.get("drawn"), "failed": said.get("failed")}
        row |= {"lost": sum("was lost" in note for note in said.get("notes", []))}
        row |= {"damaged": sum(self._wanted[file] != content for file, content in found.items())}
        row |= {"missing": len(self._wanted) - len(found)}
        with self._started(name) as process:  # without Ray
            out, again_err = process.communicate()
        again = json.loads(out.splitlines()[-1]) if out.strip() else {}
        row |= {"again": [process.returncode, again.get("drawn"), again.get("done_before")]}
        row |= {"whole": self._place.pixels(name) == self._wanted, "left": self._place.unfinished()}
        return row | ({"said": (err + again_err)[-500:]} if ray_trouble(row) else {})

    def _started(self, out: str, *words: str) -> subprocess.Popen[str]:
        asked = ["batch", "model", "prompts.jsonl", "--out", out, *BATCH, *words]
        return self._place.start(["-m", "tightfit", *asked])


class Killer:
    """Kills one worker after another, while it is started or while it draws, until a batch has lost `most`."""

    def __init__(self, results: Path, choice: random.Random, most: int) -> None:
        self._results, self._choice, self._most = results, choice, most
        self.kills: list[Row] = []
        self._seen: set[int] = set()  # processes that were there at the last kill
        self._drawn = 0  # requests that were done at the last kill
        self._next()

    def _next(self) -> None:
        self._moment = self._choice.choice(("starting", "drawing"))
        self._delay = self._choice.uniform(0, 10 if self._moment == "starting" else 2)
        self._due: float | None = None

    def look(self) -> None:
        """Kill a worker if its moment has come."""
        found, drawn = workers(), self._count_drawn()
        new = [process for process in found if process.pid not in self._seen]
        if self._due is None and (new if self._moment == "starting" else drawn > self._drawn):
            self._due = time.monotonic() + self._delay
        if self._due is None or time.monotonic() < self._due or not found or len(self.kills) == self._most:
            return
        killed = self._choice.choice(new if self._moment == "starting" and new else found)
        age = time.time() - killed.create_time()
        killed.kill()
        self.kills.append({"moment": self._moment, "age": round(age, 1), "drawn": drawn})
        self._seen, self._drawn = {process.pid for process in found}, drawn
        self._next()

    def _count_drawn(self) -> int:
        return self._results.read_bytes().count(b"\n") if self._results.exists() else 0


def workers() -> list[psutil.Process]:
    """Processes of actors, on all nodes of this computer."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if "ray::BatchWorker" in " ".join(process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process)
    return found


def ray_trouble(row: Row) -> str | None:
    if row["hung"]:
        return "it hung"
    if row["damaged"]:
        return "a damaged picture"
    if row["left"]:
        return "something was left"
    if not row["whole"] or row["again"] != [0, row["missing"], REQUESTS - row["missing"]]:
        return "the next run did not complete it"
    if row["missing"] != (row["failed"] or 0) or 3 * row["missing"] > len(row["kills"]):
        return "a request was not drawn, and had not lost three workers"
    return None if row["kills"] else "nothing was killed"


KINDS: dict[str, Callable[[Place, random.Random], Any]] = {"rank": Ranks, "shard": Shards, "ray": RayBatches}


def trouble(row: Row) -> str | None:
    """What is wrong with a row, if anything."""
    return {"rank": rank_trouble, "shard": shard_trouble, "ray": ray_trouble}[row["kind"]](row)


def kills_of(rows: list[Row], kind: str) -> int:
    """Processes of that kind that were killed."""
    return sum(len(row.get("kills", [1])) for row in rows if row["kind"] == kind)


def attack(kind: str, count: int, results: Path, choice: random.Random) -> list[Row]:
    """Kill until `results` has `count` kills of that kind; return all its rows."""
    results.touch()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    if kills_of(rows, kind) < count:
        with tempfile.TemporaryDirectory() as folder:
            attacked = KINDS[kind](Place(Path(folder)), choice)
            try:
                while kills_of(rows, kind) < count:
                    if found := attacked.row():
                        rows.append({"kind": kind, **found})
                        with results.open("a") as file:
                            file.write(f"{json.dumps(rows[-1])}\n")
            finally:
                getattr(attacked, "close", lambda: None)()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--results", type=Path, default=RESULTS)
    wishes = parser.parse_args()
    for kind in wishes.kind or KINDS:
        rows = attack(kind, wishes.count, wishes.results, random.Random(time.time_ns()))
        for what, times in collections.Counter(trouble(row) for row in rows if row["kind"] == kind).most_common():
            print(f"{kind}: {times} {what or 'clean'}")
        print(f"{kind}: {kills_of(rows, kind)} kills")


if __name__ == "__main__":
    main()
