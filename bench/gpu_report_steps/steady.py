"""What goes wrong, and what should not: memory that others take, races, and compiled blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tightfit
from cuda_stub import driver
from gpu_report_steps.plan import Step
from gpu_report_steps.records import ROOT, Record
from gpu_report_steps.stub import computing_if_stub
from tightfit.run.call_arguments import request_of
from tiny_pipelines import CASES, TinyCase, run

__all__ = ["ballast", "compiled", "sanitizer"]

MIB = 2**20
SCALE = 24  # of the tiny FLUX beside a ballast: 340 MiB of weights
BUDGET = 256 * MIB
LEFT = (512, 384, 256, 192, 128, 96, 64, 32, 8)  # MiB that the ballast leaves free, one after another
FLUX = next(case for case in CASES if case.name == "Flux")
HOLDER = """
import sys, torch
held = []
print("ready", flush=True)
for line in sys.stdin:
    held.clear()
    torch.cuda.empty_cache()
    left = int(line)
    if left >= 0:
        free = torch.cuda.mem_get_info()[0]
        held.append(torch.empty(max(free - left, 1), dtype=torch.uint8, device="cuda"))
    print("done", flush=True)
"""


def ballast(record: Record, step: Step) -> None:
    """Calls within a budget while another process leaves ever less of the card, and one when it is gone."""
    record.rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STUB_CARD_FILE"] = str(Path(folder) / "card")  # the stub's card, for both processes
        with _holder() as leave, computing_if_stub():
            _beside(leave, record)


def _beside(leave: Any, record: Record) -> None:
    pipe = FLUX.make(SCALE)  # larger than what is left in the end: a tiny one would never run out of memory
    inputs = FLUX.call()
    fitted = tightfit.fit(pipe, budget=BUDGET, request=request_of(pipe, (), inputs), device="cuda")
    wanted = run(pipe, FLUX).cpu()
    taken = torch.cuda.memory_allocated()
    for left in (*LEFT, -1):
        torch.cuda.empty_cache()  # so that memory is asked of the driver again
        leave(left * MIB if left >= 0 else -1)
        outcome = _outcome(pipe, wanted)
        record.add(left=left * MIB if left >= 0 else None, **outcome, kept=torch.cuda.memory_allocated() - taken)
    fitted.undo()


def _outcome(pipe: Any, wanted: torch.Tensor) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    try:
        found = run(pipe, FLUX).cpu()
    except (tightfit.BudgetTooSmall, torch.OutOfMemoryError) as error:
        return {"outcome": "out of memory", "error": str(error).splitlines()[0][:200]}
    except Exception as error:  # to be shown, not to end the step
        return {"outcome": "other error", "error": f"{type(error).__name__}: {error}"[:200]}
    difference = float((found - wanted).norm() / wanted.norm())
    # where memory ran out, an autoencoder may decode in strips, which sum in another order
    right = "right" if difference <= 1e-3 else "wrong"
    return {"outcome": right, "difference": difference, "reserved": torch.cuda.max_memory_reserved()}


@contextmanager
def _holder() -> Iterator[Any]:
    """Another process, told how many bytes to leave free on the card (-1: all that it has)."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout
        answers.readline()

        def leave(size: int) -> None:
            requests.write(f"{size}\n")
            requests.flush()
            if not answers.readline():
                raise RuntimeError("the process that holds memory has ended")

        yield leave
        requests.close()


def sanitizer(record: Record, step: Step) -> None:
    """torch.cuda._sanitizer, by tests/cuda_stub/sanitize.py, which compares streams on a real card as well."""
    record.rows = []
    plans = ["level 0", "page-locked", "budget"]
    command = [sys.executable, "-W", "ignore", "-m", "cuda_stub.sanitize", "Flux", "--plan", *plans]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            record.add(**json.loads(line))
    if done.returncode or len(record.rows) < len(plans):
        raise RuntimeError(" ".join(done.stderr.split())[-300:] or f"ended with {done.returncode}")


def compiled(record: Record, step: Step) -> None:
    """Blocks are compiled once and weights are streamed around them; on the stub without generated kernels."""
    record.rows = []
    with computing_if_stub():
        for backend in ("aot_eager", *([] if driver.loaded() else ["inductor"])):
            record.add(backend=backend, **_streamed(FLUX, backend))


def _streamed(case: TinyCase, backend: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    plan = {"components": {"transformer": {"placement": "stream"}}}
    plain: Any = case.make()
    fitted = tightfit.fit(plain, plan=plan, device="cuda", count_activations=False)
    run(plain, case)
    began = time.perf_counter()
    wanted = run(plain, case).cpu()
    eager = time.perf_counter() - began
    fitted.undo()
    pipe: Any = case.make()
    pipe.transformer.compile_repeated_blocks(backend=backend)
    fitted = tightfit.fit(pipe, plan=plan, device="cuda", count_activations=False)
    run(pipe, case)
    counters.clear()
    began = time.perf_counter()
    found = run(pipe, case).cpu()
    seconds = time.perf_counter() - began
    again = dict(counters["stats"])
    fitted.undo()
    difference = float((found - wanted).norm() / wanted.norm())
    return {"seconds": seconds, "eager": eager, "compiled_again": again, "difference": difference}
