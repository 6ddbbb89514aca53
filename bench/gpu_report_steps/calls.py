"""Whole calls of known models at full size: peaks and times beside the predicted ones, and many calls in a row."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import torch

from cuda_stub import driver
from gpu_report_steps.card import this_card
from gpu_report_steps.plan import Step
from gpu_report_steps.records import Record
from gpu_report_steps.stub import small_values_if_stub, weighted
from tightfit import fit
from tightfit.catalog.known import known_model
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.simulate import simulate_call

__all__ = ["in_a_row", "peaks"]

STEPS = {"wan-2.1-14b": 2}  # of denoising; others do FEW
FEW = 4
GB = 10**9
BUDGET, CALLS = 8 * GB, 20
SHARE = 0.9  # of the card, as a budget, where level 0 does not fit


def peaks(record: Record, step: Step) -> None:
    """Two calls: bytes of the first, which starts with an empty allocator, and seconds of the second."""
    if record.rows:
        return
    model, card = step.model, this_card()
    asked = known_model(model).request.model_copy(update={"steps": STEPS.get(model, FEW)})
    choices: dict[str, Any] = {"level": 0}
    told = simulate_call(model, card, choices, asked)
    pipe = weighted(model)
    if told.fits:
        fitted = fit(pipe, device="cuda", request=asked, level=0)
    else:
        fitted = fit(pipe, device="cuda", request=asked, budget=round(card.bytes * SHARE))
        told = simulate_call(model, card, fitted.plan.to_mapping(), asked)
    arguments = call_arguments(pipe, Prompt("a prompt", seed=0), asked)
    torch.cuda.reset_peak_memory_stats()
    traces = []
    for _ in range(2):
        with small_values_if_stub():
            pipe(**arguments, output_type="pt")
        traces.append(fitted.report().trace)
    first, second = traces
    phases = [
        {
            "phase": real.name,
            "allocated": [real.peak_bytes, mine.peak_bytes],
            "reserved": [real.peak_reserved, mine.peak_reserved],
            "seconds": [timed.seconds, mine.seconds],
        }
        for real, timed, mine in zip(first.phases, second.phases, told.trace.phases, strict=True)
    ]
    record.add(
        model=model,
        request=asked.described,
        steps=asked.steps,
        plan="level 0" if choices and fitted.plan.budget is None else "budget",
        reserved=[torch.cuda.max_memory_reserved(), max(phase.peak_reserved for phase in told.trace.phases)],
        seconds=[second.seconds, told.trace.seconds],
        first_seconds=first.seconds,
        phases=phases,
    )


def in_a_row(record: Record, step: Step) -> None:
    """A row for each call; those of a run that was stopped are measured again, because a process starts anew."""
    record.rows = []
    asked = known_model(step.model).request.model_copy(update={"steps": FEW})
    pipe, process = weighted(step.model), psutil.Process()
    budget = 2 * GB if driver.loaded() else BUDGET
    fitted = fit(pipe, device="cuda", request=asked, budget=budget)
    arguments = call_arguments(pipe, Prompt("a prompt", seed=0), asked)
    for number in range(1, CALLS + 1):
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with small_values_if_stub():
            pipe(**arguments, output_type="pt")
        torch.cuda.synchronize()
        record.add(
            model=step.model,
            budget=budget,
            call=number,
            seconds=time.perf_counter() - began,
            reserved=torch.cuda.max_memory_reserved(),
            allocated_after=torch.cuda.memory_allocated(),
            pinned=torch.cuda.host_memory_stats().get("allocated_bytes.current"),
            resident=process.memory_info().rss,
            files=len(os.listdir("/proc/self/fd")),
            threads=process.num_threads(),
        )
    fitted.undo()
