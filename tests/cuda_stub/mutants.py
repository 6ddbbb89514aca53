"""What shows when a wait is missing: scenarios without one ordering of the sources after the other.

python -m cuda_stub.mutants [--sample N] [--seed N] [--caught FILE] [--results FILE]: on the stub of a card, a line of
JSON for each. "caught": by races, hazards, wrong numbers, more memory, an error or a hang; "survived": reached, and
nothing shows; "not reached".
Each runs in a fork of one process that has imported everything, and only through the scenarios that reach it. A card
does not survive a fork, but the stub's does, as long as the process that is forked has nothing on it.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from cuda_stub import driver
from cuda_stub.compute import computing
from cuda_stub.orderings import Ordering, all_orderings, leave_out, notice
from cuda_stub.plugin import rates_without_numbers
from cuda_stub.resume import sources_of, with_these_sources
from cuda_stub.scenarios import SCENARIOS, begin_peak, peak, use_free_memory
from tiny_pipelines import CASES, run

Say = Callable[[str], None]
TRIES = 3  # on a machine with little time to spare, a thread that should have been waited for may be in time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--caught", type=Path, help="only those that were caught, by these results")
    parser.add_argument("--only", help="a regular expression that is found in the ordering")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.cuda.init()
    for name in ("Flux", "StableDiffusion"):  # whatever is imported by the first call
        case = next(case for case in CASES if case.name == name)
        run(case.make(), case)
    assert not driver.count("taken"), "a card whose memory is shared with the forks"
    orderings, scenarios = _chosen(options)
    with rates_without_numbers(), tempfile.TemporaryDirectory() as folder:
        references = Path(folder) / "references.pt"
        begun = time.monotonic()
        first = _in_a_fork(lambda say: _references(orderings, scenarios, references, say), patience=1200)
        if first.get("outcome") != "ok":
            sys.exit(f"without any mutant: {first}")
        print(f"without any mutant: {time.monotonic() - begun:.0f} s", first["seconds"], file=sys.stderr, flush=True)
        done = _done(options.results)
        for ordering in orderings:
            if str(ordering) in done:
                continue
            begun = time.monotonic()
            ways = sorted(first["reached"].get(str(ordering), ()), key=lambda name: first["seconds"][name])
            if ways:
                patience = 60 + 20 * sum(first["seconds"][name] for name in ways)
                for _ in range(TRIES):
                    found = _in_a_fork(lambda say: _outcome(ordering, ways, references, say), patience)  # noqa: B023 - now
                    if found["outcome"] == "caught":
                        break
            else:
                found = {"outcome": "not reached"}
            line = {"ordering": str(ordering), **found, "seconds": round(time.monotonic() - begun, 1), **sources_of()}
            print(json.dumps(line), flush=True)
            if options.results:
                with options.results.open("a") as results:
                    results.write(json.dumps(line) + "\n")


def _chosen(options: argparse.Namespace) -> tuple[list[Ordering], list[str]]:
    """Which orderings are left out, and the scenarios to see it in: of what was caught before, those that it took."""
    every = all_orderings()
    names = dict(zip(every, _names(map(str, every)), strict=True))
    chosen = [each for each in every if re.search(options.only or "", str(each))]
    caught: dict[str, str] = {}
    if options.caught:
        lines = [json.loads(line) for line in options.caught.read_text().splitlines()]
        for name, line in zip(_names(line["ordering"] for line in lines), lines, strict=True):
            if line["outcome"] == "caught":
                caught[name] = line["in"]
        chosen = [each for each in chosen if names[each] in caught]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    took = {caught[names[each]] for each in chosen if caught}
    return chosen, [name for name in SCENARIOS if name in took or not took]


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
    return {line["ordering"] for line in with_these_sources(file, lambda line: "")} if file else set()


def _in_a_fork(work: Callable[[Callable[[str], None]], dict[str, Any]], patience: float) -> dict[str, Any]:
    """What `work` returns in a child process, which says where it is by what it is given."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            torch.cuda._is_in_bad_fork = lambda: False
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # races are counted
            try:
                answer = work(lambda where: _write(writing, {"in": where}))
            except Exception as error:
                answer = {"outcome": f"{type(error).__name__}: {str(error)[:300]}"}
            _write(writing, answer)
        finally:
            os._exit(0)
    os.close(writing)
    deadline, ended = time.monotonic() + patience, {"outcome": "caught", "by": "the process dies"}
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ended = {"outcome": "caught", "by": f"hangs for {patience:.0f} s"}
            break
        time.sleep(0.05)
    with os.fdopen(reading) as answers:
        lines = [json.loads(line) for line in answers]
    return lines[-1] if lines and "outcome" in lines[-1] else ended | (lines[-1] if lines else {})


def _write(pipe: int, line: dict[str, Any]) -> None:
    os.write(pipe, (json.dumps(line) + "\n").encode())


def _made(name: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    """What a scenario makes, and the memory that it takes and leaves."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream from its first product on
    begin = torch.cuda.memory_allocated()
    begin_peak()
    made = SCENARIOS[name]()
    most = peak() - begin
    use_free_memory()
    made = [each.cpu() for each in made]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    memory = {"peak": most, "left": torch.cuda.memory_allocated() - begin, "locked": driver.count("registered")}
    return made, memory


def _references(orderings: list[Ordering], scenarios: list[str], file: Path, say: Say) -> dict[str, Any]:
    """What scenarios make, twice the same; how long each takes; and which of them reach an ordering."""
    reached: dict[str, list[str]] = {}
    now = ""

    def note(ordering: Ordering) -> None:
        ways = reached.setdefault(str(ordering), [])
        if now not in ways:
            ways.append(now)

    notice(orderings, note)
    found, seconds = {}, {}
    with computing():
        for now in scenarios:
            say(now)
            begun = time.monotonic()
            found[now] = _made(now)
            seconds[now] = round(time.monotonic() - begun, 2)
            wrong = {name: driver.count(name) for name in ("races", "hazards") if driver.count(name)}
            if wrong:
                return {"outcome": f"not clean: {wrong} in {now}"}
    torch.save(found, file)
    return {"outcome": "ok", "seconds": seconds, "reached": reached}


def _outcome(ordering: Ordering, ways: list[str], references: Path, say: Say) -> dict[str, Any]:
    """Scenario by scenario, until something shows."""
    wanted = torch.load(references)
    now = ""
    leave_out(ordering)
    with computing():
        for now in ways:
            say(now)
            try:
                made, memory = _made(now)
            except Exception as error:
                by = f"{type(error).__name__}: {str(error)[:150]}"
                return {"outcome": "caught", "by": by, "in": now}
            for what in ("races", "hazards"):
                if driver.count(what):
                    return {"outcome": "caught", "by": f"{driver.count(what)} {what}", "in": now}
            right, usual = wanted[now]
            if not all(map(torch.equal, made, right)):
                return {"outcome": "caught", "by": "wrong numbers", "in": now}
            usual["peak"] += usual["peak"] // 20  # a thread's copies may come a little sooner or later
            more = {name: memory[name] - usual[name] for name in usual if memory[name] > usual[name]}
            if more:
                return {"outcome": "caught", "by": f"more memory: {more}", "in": now}
    return {"outcome": "survived", "in": ways}


if __name__ == "__main__":
    main()
