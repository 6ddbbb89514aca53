"""What libraries raise during a pipeline call → errors that say which argument or which component is to blame."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from tightfit.checkpoint.configurations import first_line
from tightfit.errors import RequestError, RunError, TightfitError
from tightfit.schema.request import Request

__all__ = ["explained", "refusing_nan"]

_CHECKS = ("check_inputs", "set_timesteps")  # functions of pipelines and schedulers that validate arguments


def explained(error: Exception) -> TightfitError | None:
    """Return a RequestError for arguments that a pipeline or scheduler refused, a RunError for all else in a call.

    None if `error` was not raised in a call of a pipeline.
    """
    frames = list(_frames(error.__traceback__))
    pipe = next((owner for _, owner in frames if isinstance(owner, DiffusionPipeline)), None)
    if pipe is None or isinstance(error, MemoryError):
        return None
    if isinstance(error, ValueError) and frames[-1][0] in _CHECKS:
        return RequestError(" ".join(str(error).split()))
    said = f"{type(pipe).__name__} failed{_place(pipe, [owner for _, owner in frames])}"
    return RunError(f"{said}: {first_line(error)}", cause=type(error).__name__)


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, Any]]:
    """Name of each function, from the outermost on, and the object that it is a method of."""
    while trace is not None:
        yield trace.tb_frame.f_code.co_name, trace.tb_frame.f_locals.get("self")
        trace = trace.tb_next


def _place(pipe: DiffusionPipeline, owners: list[Any]) -> str:
    """In which component it happened, and which configuration that is made from; "" if in none."""
    known: dict[int, str] = {}
    for name, part in pipe.components.items():
        known |= {id(each): name for each in (part.modules() if isinstance(part, nn.Module) else [part])}
    name = next((known[id(owner)] for owner in reversed(owners) if owner is not None and id(owner) in known), None)
    if name is None:
        return ""
    part = pipe.components[name]
    file = getattr(part, "config_name", None) or ("config.json" if isinstance(part, nn.Module) else "")
    return f" in {name} ({type(part).__name__}, as {name}/{file} describes it)"


@contextlib.contextmanager
def refusing_nan(request: Request) -> Iterator[None]:
    """RunError if numbers that are none (NaN) are made into pixels: NumPy warns of it, and makes them black."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "invalid value encountered in cast", RuntimeWarning)
        try:
            yield
        except RuntimeWarning as warning:
            guidance = "" if request.guidance is None else f"guidance {request.guidance:g} and "
            what = f"the pictures would have pixels that are no numbers (NaN), for {guidance}{request.described}"
            raise RunError(f"{what}: a smaller guidance, or --dtype float32, may do") from warning
