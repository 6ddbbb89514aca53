"""What shows when a wait is missing: tiny pipelines without one ordering of the sources after the other.

python -m cuda_stub.mutants [--sample N] [--seed N] [--results FILE]: a line of JSON for each, on the stub of a card.
"caught": by races, hazards, wrong numbers, an error or a hang; "survived": reached, and nothing shows; "not reached".
Each runs in a fork of one process that has imported everything. A card does not survive a fork, but the stub's does:
all of it is memory of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tightfit
import tightfit.apply.fitting
import tightfit.devices.cuda
from cuda_stub import driver
from cuda_stub.compute import computing
from cuda_stub.orderings import Ordering, all_orderings, leave_out
from cuda_stub.plugin import rates_without_numbers
from cuda_stub.resume import _of_what
from tightfit.apply.weights import staging
from tightfit.measure.modules import find_components
from tightfit.run.shape import request_of
from tiny_pipelines import CASES, run

ON_DISK = {"home": "disk", "placement": "per-unit"}
SCENARIOS: dict[str, tuple[str, Any]] = {
    "streamed": ("Flux", {"level": 3, "vae": {"slicing": False}}),
    "maps in host memory": ("StableDiffusion", {"vae": {"strips": 30_000, "maps": "host"}}),
    "waiting activations": ("StableDiffusion", {"level": 0, "offload_activations": True}),
    "disk": ("Flux", "disk"),
    "budget": ("Flux", "budget"),
}
CALLS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.cuda.init()
    staging.SIZE = 64 * 1024
    for name in {name for name, _ in SCENARIOS.values()}:
        run(_case(name).make(), _case(name))  # whatever is imported by the first call
    with rates_without_numbers(), tempfile.TemporaryDirectory() as folder:
        references = Path(folder) / "references.pt"
        begun = time.monotonic()
        first = _in_a_fork(lambda: _references(references), patience=1200)
        patience = 30 + 5 * (time.monotonic() - begun)
        if first.get("outcome") != "ok":
            sys.exit(f"without any mutant: {first}")
        orderings = all_orderings()
        if options.sample:
            orderings = random.Random(options.seed).sample(orderings, min(options.sample, len(orderings)))
        done = _done(options.results)
        for ordering in orderings:
            if str(ordering) in done:
                continue
            begun = time.monotonic()
            found = _in_a_fork(lambda ordering=ordering: _outcome(ordering, references), patience)
            line = {"ordering": str(ordering), **found, "seconds": round(time.monotonic() - begun, 1), **_of_what()}
            print(json.dumps(line), flush=True)
            if options.results:
                with options.results.open("a") as results:
                    results.write(json.dumps(line) + "\n")


def _done(file: Path | None) -> set[str]:
    if file is None or not file.exists():
        return set()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    here = _of_what()
    return {line["ordering"] for line in lines if all(line[key] == here[key] for key in ("sources", "torch"))}


def _in_a_fork(work: Any, patience: float) -> dict[str, Any]:
    """What `work` returns in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            torch.cuda._is_in_bad_fork = lambda: False
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # races are counted
            try:
                answer = work()
            except Exception as error:
                answer = {"outcome": "caught", "by": f"{type(error).__name__}: {str(error)[:150]}"}
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + patience
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"outcome": "caught", "by": f"hangs for {patience} s"}
        time.sleep(0.05)
    with os.fdopen(reading) as answer:
        text = answer.read()
    return json.loads(text) if text else {"outcome": "caught", "by": "the process dies"}


def _case(name: str) -> Any:
    return next(case for case in CASES if case.name == name)


def _made(name: str) -> list[torch.Tensor]:
    """What the calls of a scenario make."""
    case_name, plan = SCENARIOS[name]
    case = _case(case_name)
    pipe = case.make()
    chosen: dict[str, Any] = {"plan": plan}
    if plan == "disk":
        chosen = {"plan": {"components": dict.fromkeys(find_components(pipe), ON_DISK)}}
    if plan == "budget":
        chosen = {"budget": 512 * 2**20, "request": request_of(pipe, (), case.call())}
    fitted = tightfit.fit(pipe, **chosen, device="cuda")
    made = [run(pipe, case).cpu() for _ in range(CALLS)]
    fitted.undo()
    return made


def _references(file: Path) -> dict[str, str]:
    with computing():
        torch.save({name: _made(name)[0] for name in SCENARIOS}, file)
    found = {name: driver.count(name) for name in ("races", "hazards")}
    return {"outcome": "ok"} if not any(found.values()) else {"outcome": f"not clean: {found}"}


def _outcome(ordering: Ordering, references: Path) -> dict[str, Any]:
    """Scenario by scenario, until something shows."""
    reached: list[str] = []
    wanted = torch.load(references)
    with computing():
        now = ""
        leave_out(ordering, lambda: reached.append(now) if now not in reached else None)
        for now in SCENARIOS:
            made = _made(now)
            for what in ("races", "hazards"):
                if driver.count(what):
                    return {"outcome": "caught", "by": f"{driver.count(what)} {what}", "in": now}
            if not all(torch.equal(each, wanted[now]) for each in made):
                return {"outcome": "caught", "by": "wrong numbers", "in": now}
    return {"outcome": "survived", "in": reached} if reached else {"outcome": "not reached"}


if __name__ == "__main__":
    main()
