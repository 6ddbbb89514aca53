"""One call of a single module → its Footprint, measured on a simulated card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tightfit.apply.fitting import fit
from tightfit.checkpoint.loading import quietly
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.modules import inspect_pipeline
from tightfit.plan.default_rates import ANY_CARD
from tightfit.run.unlimited_cards import unlimited_card
from tightfit.schema.footprint import Footprint
from tightfit.simulator.operations import NAME

__all__ = ["Inputs", "measure_module"]

Inputs = Mapping[str, Any] | Sequence[Any]


def measure_module(double: nn.Module, method: str, inputs: Inputs) -> Footprint:
    """Measure `double`, a copy without weights, in one call of `method` with `inputs`: tensors, or shapes of zeros."""
    dtype = next((p.dtype for p in double.parameters() if p.is_floating_point()), torch.float32)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    with unlimited_card(ANY_CARD) as card, ExitStack() as undo, torch.no_grad(), quietly():
        fit(double, level=0, device="simulated:0")
        given = [_placed(value, dtype) for value in args]
        named = {name: _placed(value, dtype) for name, value in kwargs.items()}
        profiler = CallProfiler(card)
        profiler.follow({"model": double}, undo)
        (double if method == "forward" else getattr(double, method))(*given, **named)
        return inspect_pipeline(double).model_copy(update={"phases": profiler.phases()})


def _placed(value: Any, dtype: torch.dtype) -> Any:
    """An argument on the simulated card: a tensor is moved, a shape becomes zeros in `dtype`."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, device=NAME) if value.is_meta else value.to(NAME)
    if isinstance(value, tuple) and value and all(type(length) is int for length in value):
        return torch.zeros(value, dtype=dtype, device=NAME)
    return value
