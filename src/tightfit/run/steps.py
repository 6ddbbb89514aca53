"""How many denoising steps a call takes."""

from __future__ import annotations

import inspect
from typing import Any

from tightfit.schema.request import Request

__all__ = ["steps_of"]


def steps_of(pipe: Any, request: Request) -> int | None:
    """Return how many steps a call of `pipe` takes: as asked, or its default; None if it has none."""
    if request.steps is not None:
        return request.steps
    parameter = inspect.signature(type(pipe).__call__).parameters.get("num_inference_steps")
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else None
