"""Weights larger than RAM, on a CPU: tightfit's disk home beside what others do, each inside a hard memory cgroup.

A FluxTransformer2DModel of 1.78 GB in bfloat16 (2 + 20 blocks, random weights) works passes of a few tokens on one
thread, while its weights lie on disk and the process may have no more than a cap. Every contender runs in a process of
its own, one after another, round after round (A B C A B C …); caches are dropped in between. This process never
imports torch: pages of libraries that it mapped would be charged to it, and the contenders would have them for free.

The bound: a pass takes as long as in memory, or as long as the disk needs for the bytes that cannot stay in RAM
(the weights, less what the cap leaves for weights), whichever is longer. The disk's rate is that of direct reads
right before and right after each contender, the better one.

    python bench/weights.py                          the whole comparison, as root; about an hour
    python bench/weights.py --small --passes 3       a small model, to try it out; writes no results
    python bench/weights.py --only tightfit,mmap     these beside the one in memory
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cage import CGROUPS, caged, can_cage, count_torch_processes, disk_rate, drop_caches, watch
from tightfit.units import format_bytes, parse_bytes

HERE = Path(__file__).parent
CHILD = HERE / "weights_contenders.py"
CONTENDERS = ("tightfit", "mmap", "disk-offload", "group-blocks", "group-leaves", "residents")
PREPARED = ("disk-offload", "group-blocks", "group-leaves")  # their own files are written once, without a cap
CAPS = {"full": "1260MB,964MB", "small": "620MB,580MB"}
KERNEL = 20_000_000  # what the kernel charges for itself: page tables, buffers
VALUES = ("first_seconds", "seconds", "blocked_seconds", "queued_seconds", "read_bytes", "peak_anonymous", "to_bound")
Row = dict[str, Any]


def run(task: Row, cap: int | None, limit: float) -> Row:
    """What one contender did: its own words, one after another, and what was seen from outside."""
    drop_caches()
    others = count_torch_processes()
    with tempfile.TemporaryDirectory() as folder, caged(cap) as cage:
        output = Path(folder, "output")
        process = cage.start([sys.executable, str(CHILD), json.dumps(task)], output)
        samples = watch(process, cage, limit)
        told = [json.loads(line) for line in output.read_text().splitlines() if line.endswith("}")]
        errors = output.with_suffix(".errors").read_text(errors="replace").strip().splitlines()
        kills = cage.kills
    failed = next((each["failed"] for each in told if "failed" in each), None)
    if kills:
        failed = "killed by the kernel: out of memory"
    elif process.returncode and failed is None:
        late = process.returncode == -9
        failed = f"stopped after {limit:.0f} s" if late else (errors or [f"ended with {process.returncode}"])[-1]
    return {"told": told, "samples": samples, "kills": kills, "failed": failed, "others": others}


def row_of(name: str, cap: int | None, seen: Row) -> Row:
    """One line of results. Steady: the median of all passes but the first."""
    told = seen["told"]
    passes = [each for each in told if "output" in each]
    moments = [each["at"] for each in told if "baseline" in each or "ready" in each]
    row: Row = {"contender": name, "cap": cap, "failed": seen["failed"], "killed": bool(seen["kills"])}
    row |= next(({"baseline": each["baseline"]} for each in told if "baseline" in each), {})
    row["peak_anonymous"] = max((count for _, count in seen["samples"]), default=0)
    row["other_torch_processes"] = seen["others"]
    if passes:
        row |= {
            "load_seconds": round(moments[1] - moments[0], 3),
            "first_seconds": round(passes[0]["seconds"], 3),
            "seconds_of_passes": [round(each["seconds"], 3) for each in passes],
            "outputs": sorted({each["output"] for each in passes}),
            "finite": all(each["finite"] for each in passes),
        }
    if passes[1:] and not row["failed"]:
        for key in ("seconds", "cpu_seconds", "blocked_seconds", "queued_seconds", "read_bytes"):
            row[key] = round(statistics.median(each[key] for each in passes[1:]), 3)
    return row


def row_in_memory(task: Row, wishes: argparse.Namespace) -> Row:
    """Without a cap. It tells what the others' processes hold beside weights, and how long a pass must take."""
    seen = run(task | {"contender": "in-memory"}, None, wishes.limit)
    row = row_of("in-memory", None, seen)
    if row["failed"]:
        raise SystemExit(f"in memory: {row['failed']}")
    ready = next(each["at"] for each in seen["told"] if "ready" in each)
    before = [count for at, count in seen["samples"] if at <= ready]
    row["activations"] = row["peak_anonymous"] - before[-1]
    row["held"] = sum(row["baseline"].values()) + row["activations"] + KERNEL + wishes.margin
    return row


def rounds_of(wishes: argparse.Namespace, model: Path, task: Row) -> Iterator[Row]:
    """All rows, as they come: in each round first the one in memory."""
    shards, reference = sorted(model.glob("*.safetensors")), None
    for number in range(wishes.rounds):
        memory = row_in_memory(task, wishes)
        reference = reference or memory["outputs"]
        yield memory | {"round": number, "same_bits": memory["outputs"] == reference}
        rates = [disk_rate(shards)]
        for cap, name in itertools.product(wishes.caps, wishes.only):
            weights = cap - memory["held"]
            own = prepared_folder(model, name)
            seen = run(task | {"contender": name, "own": str(own), "weights": weights}, cap, wishes.limit)
            row = row_of(name, cap, seen)
            rates.append(disk_rate(shards))
            row |= {"round": number, "weights": weights, "disk_rate": round(max(rates[-2:]))}
            row["same_bits"] = row["outputs"] == reference if "outputs" in row else None
            streamed = weights_of(model) - weights
            row["bound_seconds"] = round(max(memory["seconds"], streamed / row["disk_rate"]), 3)
            row["to_bound"] = round(row["seconds"] / row["bound_seconds"], 3) if "seconds" in row else None
            yield row


def weights_of(model: Path) -> int:
    index = next(model.glob("*.index.json"))
    total: int = json.loads(index.read_text())["metadata"]["total_size"]
    return total


def prepared_folder(model: Path, name: str) -> Path:
    """Where `name` keeps files of its own; empty where it writes them anew each time it loads."""
    folder = model.with_name(f"{model.name}-{name}")
    if name not in PREPARED:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def prepare(model: Path, task: Row, names: list[str]) -> None:
    """The checkpoint and the contenders' own files, where they are not there yet."""
    model.parent.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        print(f"making {model}", flush=True)
        subprocess.run([sys.executable, str(CHILD), json.dumps(task | {"contender": "make"})], check=True)
    for name in names:
        folder = prepared_folder(model, name)
        done = folder / ".done"
        if name in PREPARED and not done.exists():
            print(f"making {folder}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            seen = run(task | {"contender": name, "own": str(folder), "passes": 0}, None, 3600)
            if seen["failed"] is None:
                done.touch()


def summary(rows: list[Row], by: tuple[str, ...], values: tuple[str, ...]) -> list[Row]:
    """Each contender under each setting `by`: medians of `values` over the rounds.

    Rivals' seconds against ours are medians of the ratios within a round.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in by), row["contender"]), []).append(row)
    found = []
    for (*setting, contender), group in groups.items():
        ours = {row["round"]: row.get("seconds") for row in groups.get((*setting, "tightfit"), [])}
        line: Row = {**dict(zip(by, setting, strict=True)), "contender": contender}
        for name in values:
            line[name] = _median([row[name] for row in group if row.get(name) is not None])
        pairs = [(row.get("seconds"), ours.get(row["round"])) for row in group]
        line["against_ours"] = _median([theirs / mine for theirs, mine in pairs if theirs and mine])
        judged = [row["same_bits"] for row in group if row["same_bits"] is not None]
        line["same_bits"] = all(judged) if judged else None
        line["failed"] = sorted({row["failed"] for row in group if row.get("failed")})
        found.append(line)
    return found


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def line_of(row: Row) -> str:
    cap = f"{row['cap'] / 1e6:.0f} MB" if row["cap"] else "no cap"
    text = f"{row['round'] + 1}  {cap:8} {row['contender']:13}"
    if "seconds" in row:
        bits = "same bits" if row["same_bits"] else "OTHER BITS"
        text += f" first {row['first_seconds']:6.2f} s  then {row['seconds']:6.2f} s"
        text += f"  {bits}  blocked {row['blocked_seconds']:4.2f} s  queued {row['queued_seconds']:4.2f} s"
        text += f"  read {format_bytes(row['read_bytes']):>8}"
        text += f"  peak {format_bytes(row['peak_anonymous']):>8}"
    if row.get("to_bound"):
        text += f"  {row['to_bound']:.2f} × bound of {row['bound_seconds']:.2f} s at {row['disk_rate'] / 1e6:.0f} MB/s"
    return f"{text} {row['failed'] or ''}".rstrip()


def write(name: str, facts: Row) -> None:
    """bench/results/NAME.json, by a process of its own: the machine's description needs torch."""
    code = "import json, sys; from measuring import write; write(sys.argv[1], json.load(sys.stdin))"
    command = [sys.executable, "-c", code, name]
    subprocess.run(command, cwd=HERE, input=json.dumps(facts), text=True, stdout=subprocess.DEVNULL, check=True)


def read_wishes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Weights larger than RAM, on a CPU; --small tries it out.")
    parser.add_argument("--caps", help="sizes of the cgroup, e.g. 1260MB,964MB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=4, help="of which the first is told apart")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders beside the one in memory")
    parser.add_argument("--small", action="store_true", help="a model of 204 MB; writes no results")
    parser.add_argument("--tokens", default="9,7", help="of picture (a square number) and text")
    parser.add_argument("--margin", type=parse_bytes, default="32MB", help="what is left unused below the cap")
    parser.add_argument("--name", default="weights-cpu", help="of the file of results")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a contender is stopped")
    wishes = parser.parse_args()
    wishes.size = "small" if wishes.small else "full"
    wishes.caps = [parse_bytes(cap) for cap in (wishes.caps or CAPS[wishes.size]).split(",")]
    wishes.only = wishes.only.split(",")
    wishes.tokens = [int(count) for count in wishes.tokens.split(",")]
    unknown = set(wishes.only) - set(CONTENDERS)
    if unknown or wishes.passes < 2:
        parser.error(f"--only takes {', '.join(CONTENDERS)}; --passes at least 2")
    return wishes


def main() -> None:
    wishes = read_wishes()
    if not can_cage():
        print(f"skipped: this bench needs root and memory cgroups (version 1) in {CGROUPS}")
        return
    cache = Path(os.environ.get("TIGHTFIT_BENCH_CACHE") or Path(tempfile.gettempdir(), "tightfit-bench"))
    model = cache / f"flux-{wishes.size}"
    task = {"size": wishes.size, "model": str(model), "passes": wishes.passes, "tokens": wishes.tokens}
    prepare(model, task, wishes.only)
    flags = Path("/proc/cpuinfo").read_text().split()
    facts: Row = {
        "weights_bytes": weights_of(model),
        "tokens": wishes.tokens,
        "margin": wishes.margin,
        "bfloat16_in_hardware": "avx512_bf16" in flags or "amx_bf16" in flags,
    }
    rows: list[Row] = []
    for row in rounds_of(wishes, model, task):
        rows.append(row)
        print(line_of(row), flush=True)
        if not wishes.small:
            write(wishes.name, facts | {"summary": summary(rows, ("cap",), VALUES), "rows": rows})
    for line in summary(rows, ("cap",), VALUES):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
