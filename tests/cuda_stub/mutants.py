"""What shows when a wait is missing: tiny pipelines without one ordering of the sources after the other.

python -m cuda_stub.mutants [--sample N] [--seed N] [--caught FILE] [--results FILE]: on the stub of a card, a line of
JSON for each. "caught": by races, hazards, wrong numbers, more memory, an error or a hang; "survived": reached, and
nothing shows; "not reached".
Each runs in a fork of one process that has imported everything. A card does not survive a fork, but the stub's does:
all of it is memory of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Scenario:
    """Two calls of a tiny pipeline under a plan, and what happens between them."""

    case: str
    plan: Any
    faults: dict[str, int] = field(default_factory=dict)
    between: str = ""


ON_DISK = {"home": "disk", "placement": "per-unit"}
STREAMED = {"level": 3, "vae": {"slicing": False}}
IN_STRIPS = {"vae": {"strips": 30_000, "maps": "host"}}
WAITING = {"level": 0, "offload_activations": True}
SCENARIOS: dict[str, Scenario] = {
    "streamed": Scenario("Flux", STREAMED),
    "streamed, refused page locks": Scenario("Flux", STREAMED, {"fail_register": 1, "fail_register_times": 10**6}),
    "streamed, another stream": Scenario("Flux", STREAMED, between="another stream"),
    "streamed, looked at": Scenario("Flux", STREAMED, between="looks at weights"),
    "streamed, interrupted": Scenario("Flux", STREAMED, between="interrupted"),
    "waiting activations": Scenario("StableDiffusion", WAITING),
    "waiting, interrupted": Scenario("StableDiffusion", WAITING, between="interrupted"),
    "disk": Scenario("Flux", "disk"),
    "disk, interrupted": Scenario("Flux", "disk", between="interrupted"),
    "budget": Scenario("Flux", "budget"),
    "maps in host memory": Scenario("StableDiffusion", IN_STRIPS),
    "maps, interrupted": Scenario("StableDiffusion", IN_STRIPS, between="interrupted"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--caught", type=Path, help="only those that were caught, by these results")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.cuda.init()
    staging.SIZE = 64 * 1024
    for name in {scenario.case for scenario in SCENARIOS.values()}:
        run(_case(name).make(), _case(name))  # whatever is imported by the first call
    with rates_without_numbers(), tempfile.TemporaryDirectory() as folder:
        references = Path(folder) / "references.pt"
        begun = time.monotonic()
        first = _in_a_fork(lambda: _references(references), patience=1200)
        patience = 30 + 5 * (time.monotonic() - begun)
        if first.get("outcome") != "ok":
            sys.exit(f"without any mutant: {first}")
        orderings = all_orderings()
        if options.caught:
            lines = [json.loads(line) for line in options.caught.read_text().splitlines()]
            names = _names(line["ordering"] for line in lines)
            caught = {name for name, line in zip(names, lines, strict=True) if line["outcome"] == "caught"}
            names = _names(map(str, orderings))
            orderings = [ordering for name, ordering in zip(names, orderings, strict=True) if name in caught]
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


def _names(orderings: Iterable[str]) -> list[str]:
    """What each of them is called also where lines before it have come or gone; the second of a name has number 2."""
    seen: Counter[str] = Counter()
    names = []
    for ordering in orderings:
        name = re.sub(r":\d+ ", ": ", ordering, count=1)
        seen[name] += 1
        names.append(f"{name} {seen[name]}")
    return names


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


class _Interruption(Exception):
    pass


@contextmanager
def _interrupting(network: torch.nn.Module) -> Iterator[None]:
    """What computes last in `network`'s middle is left with an exception."""
    layers = [module for module in network.modules() if not list(module.children()) and list(module.parameters())]

    def interrupt(*_: Any) -> None:
        raise _Interruption

    hook = layers[len(layers) // 2].register_forward_hook(interrupt)
    try:
        yield
    finally:
        hook.remove()


def _between(pipe: Any, case: Any, what: str) -> None:
    networks = find_components(pipe)
    if what == "looks at weights":
        for network in networks.values():
            float(next(network.parameters()).detach().sum())
    if what == "interrupted":
        for name in set(networks) & {"vae", "unet", "transformer", "text_encoder"}:
            network = networks[name].decoder if name == "vae" else networks[name]
            with suppress(_Interruption), _interrupting(network):
                run(pipe, case)


def _made(name: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    """What the calls of a scenario make, and the memory that they take and leave."""
    scenario = SCENARIOS[name]
    case = _case(scenario.case)
    pipe = case.make()
    chosen: dict[str, Any] = {"plan": scenario.plan}
    if scenario.plan == "disk":
        chosen = {"plan": {"components": dict.fromkeys(find_components(pipe), ON_DISK)}}
    if scenario.plan == "budget":
        chosen = {"budget": 512 * 2**20, "request": request_of(pipe, (), case.call())}
    gc.collect()
    begin = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with driver.faults(**scenario.faults) if scenario.faults else nullcontext():
        fitted = tightfit.fit(pipe, **chosen, device="cuda")
        made = [run(pipe, case)]
        _between(pipe, case, scenario.between)
        with torch.cuda.stream(torch.cuda.Stream()) if scenario.between == "another stream" else nullcontext():
            made.append(run(pipe, case))
        peak = torch.cuda.max_memory_allocated() - begin
        if scenario.between == "interrupted":
            with suppress(_Interruption), _interrupting(find_components(pipe)["text_encoder"]):
                run(pipe, case)
        fitted.undo()
    torch.cuda.synchronize()
    gc.collect()
    memory = {"peak": peak, "left": torch.cuda.memory_allocated() - begin, "locked": driver.count("registered")}
    return [picture.cpu() for picture in made], memory


def _references(file: Path) -> dict[str, str]:
    with computing():
        found = {name: _made(name) for name in SCENARIOS}
    torch.save({name: (made[0], memory) for name, (made, memory) in found.items()}, file)
    wrong = {name: driver.count(name) for name in ("races", "hazards") if driver.count(name)}
    unequal = [name for name, (made, _) in found.items() if not torch.equal(*made)]
    return {"outcome": "ok"} if not wrong and not unequal else {"outcome": f"not clean: {wrong} {unequal}"}


def _outcome(ordering: Ordering, references: Path) -> dict[str, Any]:
    """Scenario by scenario, until something shows."""
    reached: list[str] = []
    wanted = torch.load(references)
    with computing():
        now = ""
        leave_out(ordering, lambda: reached.append(now) if now not in reached else None)
        for now in SCENARIOS:
            made, memory = _made(now)
            for what in ("races", "hazards"):
                if driver.count(what):
                    return {"outcome": "caught", "by": f"{driver.count(what)} {what}", "in": now}
            picture, usual = wanted[now]
            if not all(torch.equal(each, picture) for each in made):
                return {"outcome": "caught", "by": "wrong numbers", "in": now}
            more = {name: memory[name] - usual[name] for name in usual if memory[name] > usual[name]}
            if more:
                return {"outcome": "caught", "by": f"more memory: {more}", "in": now}
    return {"outcome": "survived", "in": reached} if reached else {"outcome": "not reached"}


if __name__ == "__main__":
    main()
