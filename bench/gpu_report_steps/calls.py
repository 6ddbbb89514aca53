"""Whole calls of known models at full size: peaks and times beside the predicted ones, and many calls in a row."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from cuda_stub import driver
from gpu_report_steps.card import this_card
from gpu_report_steps.isolated import in_own_process
from gpu_report_steps.plan import Step
from gpu_report_steps.records import Record, Row
from gpu_report_steps.stub import small_values_if_stub, weighted
from tightfit import fit
from tightfit.catalog.known import known_model
from tightfit.devices.cuda import CudaDevice
from tightfit.measure.modules import find_components, find_role
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.simulate import simulate_call

__all__ = ["compiled", "in_a_row", "peaks"]

STEPS = {"wan-2.1-14b": 2}  # of denoising; others do FEW
FEW = 4
GB = 10**9
BUDGET, CALLS = 8 * GB, 20
COMPILED_BUDGET = 24 * GB
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
    torch.cuda.empty_cache()  # what was used to look at the card would be part of the reserved bytes
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
        plan="level 0" if fitted.plan.budget is None else "budget",
        reserved=[torch.cuda.max_memory_reserved(), max(phase.peak_reserved for phase in told.trace.phases)],
        seconds=[second.seconds, told.trace.seconds],
        first_seconds=first.seconds,
        phases=phases,
    )


def in_a_row(record: Record, step: Step) -> None:
    """A row for each call; those of a run that was stopped are measured again, because a process starts anew."""
    record.rows = []
    with counting_locked() as locked:
        _row_for_each_call(record, step.model, locked)


def _row_for_each_call(record: Record, model: str, locked: dict[int, int]) -> None:
    pipe, process, budget = weighted(model), psutil.Process(), 2 * GB if driver.loaded() else BUDGET
    asked = known_model(model).request.model_copy(update={"steps": FEW})
    fitted = fit(pipe, device="cuda", request=asked, budget=budget)
    arguments = call_arguments(pipe, Prompt("a prompt", seed=0), asked)
    for number in range(1, CALLS + 1):
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with small_values_if_stub():
            pipe(**arguments, output_type="pt")
        torch.cuda.synchronize()
        record.add(
            model=model,
            budget=budget,
            call=number,
            seconds=time.perf_counter() - began,
            reserved=torch.cuda.max_memory_reserved(),
            allocated_after=torch.cuda.memory_allocated(),
            pinned=sum(locked.values()),
            resident=process.memory_info().rss,
            files=len(os.listdir("/proc/self/fd")),
            threads=process.num_threads(),
        )
    fitted.undo()
    record.add(model=model, budget=budget, call="after undo", pinned=sum(locked.values()))


def compiled(record: Record, step: Step) -> None:
    """The second call as it is and with compiled blocks, each in a process of its own."""
    backend = "eager" if driver.loaded() else "inductor"  # the stub has no compiler of kernels
    for about in record.missing([{"compiled": None}, {"compiled": backend}]):
        record.add(**about, **in_own_process(_second_call, step.model, about["compiled"]))


def _second_call(model: str, backend: str | None) -> Row:
    pipe, budget = weighted(model), 2 * GB if driver.loaded() else COMPILED_BUDGET
    asked = known_model(model).request.model_copy(update={"steps": FEW})
    if backend is not None:
        for name, part in find_components(pipe).items():
            if find_role(name, part) == "denoiser":
                part.compile_repeated_blocks(backend=backend)
    fitted = fit(pipe, device="cuda", request=asked, budget=budget)
    for _ in range(2):
        with small_values_if_stub():
            pipe(**call_arguments(pipe, Prompt("a prompt", seed=0), asked), output_type="pt")
    trace = fitted.report().trace
    seconds = {phase.name: phase.seconds for phase in trace.phases}
    reserved = torch.cuda.max_memory_reserved()
    return {
        "model": model,
        "budget": budget,
        "seconds": trace.seconds,
        "denoise": seconds["denoise"],
        "reserved": reserved,
    }


@contextlib.contextmanager
def counting_locked() -> Iterator[dict[int, int]]:
    """Bytes of host memory that are page-locked in place, by address; torch's statistics know only its own blocks."""
    locked, usual = dict[int, int](), CudaDevice.lock_pages

    def lock_pages(self: CudaDevice, buffer: torch.Tensor) -> Callable[[], None] | None:
        unlock, address = usual(self, buffer), buffer.data_ptr()
        if unlock is None:
            return None
        locked[address] = buffer.nbytes

        def counted() -> None:
            unlock()
            locked.pop(address, None)

        return counted

    CudaDevice.lock_pages = lock_pages  # type: ignore[method-assign]
    try:
        yield locked
    finally:
        CudaDevice.lock_pages = usual  # type: ignore[method-assign]
