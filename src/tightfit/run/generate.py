"""A fitted pipeline and a request → images and a Report, with progress during the call."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.apply.fitting import Fitted
from tightfit.errors import RequestError
from tightfit.report.summary import Report
from tightfit.run.call_arguments import call_arguments
from tightfit.run.call_errors import explained, refusing_nan
from tightfit.run.prompt import Prompt
from tightfit.schema.request import Request
from tightfit.schema.results import PhaseTrace, Sample, Trace

__all__ = ["Result", "generate", "with_loading"]

Progress = Callable[[int, int], None]  # steps done, total steps


@dataclass(frozen=True)
class Result:
    pictures: list[Any]  # PIL images, or lists of them for videos
    report: Report


def generate(pipe: Any, fitted: Fitted, prompt: Prompt, request: Request, progress: Progress | None = None) -> Result:
    """Call `pipe`, which follows `fitted`, once.

    RequestError for arguments that it does not accept, RunError for pictures of NaN.
    """
    arguments = call_arguments(pipe, prompt, request)
    taken = inspect.signature(type(pipe).__call__).parameters
    if "output_type" in taken:
        arguments["output_type"] = "pil"  # some pipelines return arrays by default
    if progress is not None and "callback_on_step_end" in taken:

        def step_done(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            progress(step + 1, int(getattr(pipe, "num_timesteps", step + 1)))
            return kwargs

        arguments["callback_on_step_end"] = step_done
    pipe.set_progress_bar_config(disable=True)
    try:
        with refusing_nan(request):
            output = pipe(**arguments)
    except ValueError as error:
        if isinstance(found := explained(error), RequestError):
            raise found from error
        raise
    return Result(list(output[0]), fitted.report())


def with_loading(report: Report, seconds: float, weights: int) -> Report:
    """Return `report` with a first phase "load": the loading of `weights` bytes in `seconds`."""
    load = PhaseTrace(name="load", start=0.0, seconds=seconds, peak_bytes=weights, peak_weights=weights)
    begin = Sample(seconds=0.0, weights=0, activations=0), Sample(seconds=seconds, weights=weights, activations=0)
    return Report(report.plan, report.trace.after(Trace(seconds=seconds, phases=(load,), samples=begin)))


def profiled(call: Callable[[], Result], rows: int = 25) -> tuple[Result, str]:
    """Return the result of `call()` and torch.profiler's table of its costliest operations, with `rows` rows."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides Kineto's log messages
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = torch.profiler.ProfilerActivity.CUDA
    if cuda in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
        activities.append(cuda)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        result = call()
    order = "self_device_time_total" if cuda in activities else "self_cpu_time_total"
    return result, str(profile.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60))


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since now."""
    started = time.perf_counter()
    return lambda: time.perf_counter() - started
