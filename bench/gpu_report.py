"""A CUDA card's first half hour: one command, each step in a process of its own within eight minutes, one page.

    make gpu-report             on a card; goes on where it was: what is done for this code, card and torch stays
    make gpu-report DRY=1       each kind of step once, on the stub's card (tests/cuda_stub), into demo-out/gpu-report
    python bench/gpu_report.py --list
    python bench/gpu_report.py --only rates,clock        --skip "rivals wan-2.1-14b"        names or their beginnings
    python bench/gpu_report.py --again --only rates      though it is done
    python bench/gpu_report.py --page                    the page and the picture alone, of the results that are there

Results are in bench/results/gpu-report/, the page is docs/gpu-report.md, the picture docs/gpu-report.png; all are
written after each step. A step that fails or that is stopped is recorded as that, and the next one begins. A later run
begins with what has not run yet, then repeats those that failed; one that was stopped goes on with the rows that it
lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu_report_steps.plan import Step, steps
from gpu_report_steps.records import ROOT, Record, Row, commit, read_records, sources, write_record

RESULTS, PAGES = ROOT / "bench" / "results" / "gpu-report", ROOT / "docs"
DRY = ROOT / "demo-out" / "gpu-report"
LARGEST = 16 * 2**20  # bytes of a result file
DONE, RUNNING = "done", "running"


def about() -> Row:
    """What results are of: the code, the card and the versions. In a process of its own: it opens the card."""
    program = (
        "import json, torch, diffusers; print(json.dumps({'card': torch.cuda.get_device_name(0),"
        " 'torch': torch.__version__, 'diffusers': diffusers.__version__}))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"no CUDA card can be used: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return {"sources": sources(), **found}


def chosen(every: list[Step], only: str | None, skip: str | None) -> list[Step]:
    """Steps of which a name or its beginning is in `only`, and none in `skip`."""

    def named(step: Step, names: str) -> bool:
        return any(step.name.startswith(name.strip()) for name in names.split(",") if name.strip())

    return [step for step in every if (only is None or named(step, only)) and not (skip and named(step, skip))]


def in_order(every: list[Step], folder: Path, of: Row, *, again: bool) -> list[Step]:
    """What is left to do: first what has never run, in order of worth. Records of something else are removed."""
    fresh, repeated = [], []
    for step in every:
        record = read_records(folder / step.file).get(step.name)
        if record is None or record.get("of") != of or again:
            write_record(folder / step.file, step.name, {"status": "not run yet", "of": of, "rows": []})
            fresh.append(step)
        elif record["status"] == "not run yet":
            fresh.append(step)
        elif record["status"] != DONE:
            repeated.append(step)
    return fresh + repeated


def run(step: Step, folder: Path, *, dry: bool) -> str:
    """Run `step` in a process of its own, ended with all that it started; return how it ended."""
    from gpu_report_steps.stub import settings

    file, began = folder / step.file, time.monotonic()
    update(file, step, status=RUNNING, error=None, commit=commit(), measures=step.measures)
    command = [sys.executable, "-W", "ignore", __file__, "--step", step.name, "--folder", str(folder)]
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | settings(step.values) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command + ["--dry"] * dry, env=environment, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(step.limit)
        status = str(read_records(file)[step.name]["status"])
        if status == RUNNING:
            status = f"failed: ended with {code}"
    except subprocess.TimeoutExpired:
        status = f"stopped after {step.limit / 60:g} minutes"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        update(file, step, status=status, seconds=round(time.monotonic() - began, 1))
    return status


def update(file: Path, step: Step, **fields: Any) -> None:
    write_record(file, step.name, read_records(file)[step.name] | fields)


def work(step: Step, folder: Path) -> None:
    """The step itself, in this process."""
    file = folder / step.file
    module, _, function = step.run.partition(":")
    if module == "caps":  # makes calls in forked processes, which cannot open the card if this one has
        sys.modules["torchao"] = None  # type: ignore[assignment]  # opens it while diffusers imports it
    try:
        getattr(importlib.import_module(f"gpu_report_steps.{module}"), function)(Record(file, step.name), step)
        update(file, step, status=DONE, error=None)
    except Exception as error:
        traceback.print_exc()
        update(file, step, status="failed", error=" ".join(f"{type(error).__name__}: {error}".split())[:500])


def write_page(folder: Path, pages: Path, *, dry: bool) -> None:
    from gpu_report_steps.page import page
    from gpu_report_steps.picture import draw

    pages.mkdir(parents=True, exist_ok=True)
    records = all_records(folder, dry=dry)
    drawn = draw(records, pages / "gpu-report.png", dry=dry)
    (pages / "gpu-report.md").write_text(page(records, steps(dry=dry), picture=drawn, dry=dry))


def all_records(folder: Path, *, dry: bool) -> dict[str, Row]:
    files = dict.fromkeys(step.file for step in steps(dry=dry))
    return {name: record for file in files for name, record in read_records(folder / file).items()}


def read_wishes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="steps, by name or its beginning, separated by commas")
    parser.add_argument("--skip", help="steps that are left out")
    parser.add_argument("--minutes", type=float, default=0, help="after so many no further step begins; 0: all do")
    parser.add_argument("--again", action="store_true", help="also what is done already")
    parser.add_argument("--dry", action="store_true", help="each kind once, on the stub's card")
    parser.add_argument("--list", action="store_true", help="print the steps and how they ended")
    parser.add_argument("--page", action="store_true", help="only write the page and the picture")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    wishes = read_wishes()
    folder, pages = wishes.folder or (DRY if wishes.dry else RESULTS), DRY if wishes.dry else PAGES
    every = steps(dry=wishes.dry)
    if wishes.step:
        work(next(step for step in every if step.name == wishes.step), folder)
    elif wishes.list:
        records = all_records(folder, dry=wishes.dry)
        for step in every:
            print(f"{step.name:24} {step.measures:64} {records.get(step.name, {}).get('status', 'not run yet')}")
    elif wishes.page:
        write_page(folder, pages, dry=wishes.dry)
    else:
        run_all(chosen(every, wishes.only, wishes.skip), folder, pages, wishes)


def run_all(wanted: list[Step], folder: Path, pages: Path, wishes: argparse.Namespace) -> None:
    of, began = about(), time.monotonic()
    if wishes.dry != of["card"].endswith("(stub)"):
        raise SystemExit(f"the card is {of['card']}: DRY=1 is for the stub's card, and the stub's card for DRY=1")
    for step in in_order(wanted, folder, of, again=wishes.again):
        if wishes.minutes and time.monotonic() - began > wishes.minutes * 60:
            print(f"{wishes.minutes:g} minutes are over; {step.name} and later ones are left for another run")
            break
        print(f"== {step.name}: {step.measures}", flush=True)
        try:
            status = run(step, folder, dry=wishes.dry)
            print(f"== {step.name}: {status}", flush=True)
        finally:
            write_page(folder, pages, dry=wishes.dry)
    write_page(folder, pages, dry=wishes.dry)
    large = [file.name for file in folder.iterdir() if file.stat().st_size > LARGEST]
    if large:
        raise SystemExit(f"larger than 16 MiB: {', '.join(large)}")
    print(f"the page: {pages / 'gpu-report.md'}; {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
