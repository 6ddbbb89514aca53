"""Predicted beside measured: peaks (allocated, reserved) and times of whole calls, on this computer's own device.

Components have their full size and random weights. Each row runs in a process of its own, so that no allocator is
warm. Bytes are those of its first call, the time that of its second, in which nothing is counted that an allocator
does not count for itself. On a CPU, "reserved" means nothing.

    python bench/predict.py            all rows of this computer's device
    python bench/predict.py ROW …      some of them, by number; the others' results stay
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch

from measuring import RESULTS, fill_at_random, write
from tightfit import Request, fit
from tightfit.catalog.known import known_model
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.loading import load_pipeline, quietly
from tightfit.devices.choose import choose_device
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.models import find_model
from tightfit.run.planning_context import measured_machine
from tightfit.run.simulate import simulate_call
from tightfit.schema.results import Trace

DEMO = "the demo model"


@dataclass(frozen=True)
class Row:
    """One call: a known model (or the demo model), what is asked of it, and at which level."""

    model: str
    request: Request
    level: int

    @property
    def title(self) -> str:
        asked = self.request
        frames = f", {asked.frames} frames" if asked.frames else ""
        batch = f", batch {asked.batch}" if asked.batch > 1 else ""
        return f"{self.model} {asked.width}×{asked.height}{frames}{batch}, level {self.level}"


def row(model: str, height: int, width: int, level: int, **more: int) -> Row:
    return Row(model, Request(height=height, width=width, steps=more.pop("steps", 2), **more), level)


ROWS = {
    "cpu": [
        row(DEMO, 64, 64, 0, steps=20),
        row(DEMO, 64, 64, 1, steps=20, batch=4),
        row("sd-1.5", 256, 256, 0),
        row("sd-1.5", 512, 512, 0),
        row("sd-1.5", 512, 512, 1, batch=2),
        row("sd-1.5", 768, 512, 1),
        row("sdxl", 256, 256, 0),
        row("sdxl", 512, 512, 0),
        row("sdxl", 512, 768, 1),
        row("sana-1.6b", 512, 512, 0),
    ],
    "cuda": [
        row("sd-1.5", 512, 512, 0),
        row("sd-1.5", 768, 768, 1, batch=2),
        row("sdxl", 1024, 1024, 0),
        row("sdxl", 1024, 1024, 2),
        row("sdxl", 1536, 1024, 3),
        row("sd3-medium", 1024, 1024, 0),
        row("sd3-medium", 1024, 1024, 3),
        row("pixart-sigma", 1024, 1024, 0),
        row("flux.1-dev", 1024, 1024, 0),
        row("flux.1-dev", 768, 1360, 2),
        row("flux.1-dev", 1024, 1024, 3),
        row("ltx-video-2b", 480, 704, 0, frames=97),
        row("cogvideox-2b", 480, 720, 1, frames=49),
        row("wan-2.1-1.3b", 480, 832, 0, frames=81),
        row("wan-2.1-1.3b", 480, 832, 2, frames=49),
        row("qwen-image", 1024, 1024, 2),
    ],
}


def subject(row: Row) -> str | ModelFolder:
    return find_model(None) if row.model == DEMO else row.model


def pipeline(row: Row, dtype: torch.dtype | None) -> Any:
    """The real thing: the demo model, or a known model with random weights."""
    model = subject(row)
    if isinstance(model, ModelFolder):
        return load_pipeline(model, dtype or torch.float32)
    pipe = build_known(known_model(model), dtype)
    for network in find_components(pipe).values():
        fill_at_random(network)
    return pipe


def measured(row: Row) -> tuple[Trace, Trace]:
    """The first call and the second."""
    device = choose_device()
    cpu = device.kind == "cpu"
    pipe = pipeline(row, torch.float32 if cpu else None)
    pipe.set_progress_bar_config(disable=True)
    traces = []
    for count in (True, False):
        fitted = fit(pipe, level=row.level, request=row.request, device=device, count_activations=count)
        with torch.no_grad(), quietly():
            pipe(**call_arguments(pipe, Prompt("a prompt", seed=0), row.request), output_type="pt")
        traces.append(fitted.report().trace)
    return traces[0], traces[1]


def compare(row: Row) -> dict[str, Any]:
    accelerator = measured_machine().accelerators[0]
    first, second = measured(row)
    told = simulate_call(subject(row), accelerator, {"level": row.level}, row.request)
    reserved = max(phase.peak_reserved for phase in first.phases)
    pairs = {
        "bytes": (told.trace.peak_bytes, first.peak_bytes),
        "reserved": (told.peak_reserved, reserved),
        "seconds": (told.trace.seconds, second.seconds),
    }
    phases = [
        {
            "name": mine.name,
            "bytes": error(mine.peak_bytes, theirs.peak_bytes),
            "seconds": error(mine.seconds, again.seconds),
        }
        for mine, theirs, again in zip(told.trace.phases, first.phases, second.phases, strict=True)
    ]
    return {
        "row": row.title,
        "predicted": {name: pair[0] for name, pair in pairs.items()},
        "measured": {name: pair[1] for name, pair in pairs.items()},
        "error": {name: error(*pair) for name, pair in pairs.items()},
        "phases": phases,
    }


def error(predicted: float, measured: float) -> float | None:
    return round(predicted / measured - 1, 4) if measured else None


def main() -> None:
    device = choose_device()
    rows = ROWS[device.kind]
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(compare(rows[int(sys.argv[2])])))
        return
    name = f"predict-{device.kind}"
    file = RESULTS / f"{name}.json"
    kept = {each["row"]: each for each in json.loads(file.read_text())["rows"]} if file.exists() else {}
    for number in map(int, sys.argv[1:] or range(len(rows))):
        command = [sys.executable, __file__, "--only", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            print(f"{rows[number].title}: {reason}", file=sys.stderr)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        print(result["row"], result["error"], file=sys.stderr)
        kept[result["row"]] = result
        found = [kept[row.title] for row in rows if row.title in kept]
        write(name, {"summary": summary(found), "rows": found})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = {
        name: [r["error"][name] for r in rows if r["error"][name] is not None]
        for name in ("bytes", "reserved", "seconds")
    }
    return {
        name: {"median": statistics.median(map(abs, values)), "worst": max(values, key=abs)}
        for name, values in errors.items()
        if values
    }


if __name__ == "__main__":
    main()
