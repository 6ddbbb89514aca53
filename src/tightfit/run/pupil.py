"""Calls of a pipeline under plans that were made for a budget → what they teach, kept for the next plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tightfit.devices.seam import Device
from tightfit.measure.recorder import UNCOUNTED
from tightfit.records import Plan, Request, Trace
from tightfit.run.experiences import MOST, PlanningInputs
from tightfit.run.shape import request_of, shape_of

__all__ = ["CalibrationRecorder"]


class CalibrationRecorder:
    """Learns from calls on `device` that are like those for which plans were made.

    A call teaches something if it came to its end under one plan, asked for what that was made for, and if all went as
    planned: a report without notes (but that nobody counted activations, whose peaks are too low then
    to teach anything). While torch's profiler watches, nothing is learned, nor after eight calls in one process: a
    service has better things to do.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bases: dict[Request, PlanningInputs] = {}
        self._learned: Counter[Request] = Counter()

    def studies(self, plan: Plan, basis: PlanningInputs) -> None:
        """`plan` was made from `basis`, and so is any other for the same request."""
        if plan.request is not None:
            self._bases[plan.request] = basis

    def ended(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, trace: Trace) -> None:
        """A call of `pipe` with these arguments, all of it under `plan`, is over."""
        basis = self._bases.get(plan.request) if plan.request else None
        if basis is None or plan.request is None or self._learned[plan.request] == MOST:
            return
        if plan.budget is not None and plan.budget.devices:
            return  # of which device would that be true?
        asked = request_of(pipe, args, kwargs)
        disturbed = set(trace.notes) - {UNCOUNTED} or torch._C._autograd._profiler_enabled()
        if asked is None or disturbed or shape_of(pipe, asked) != shape_of(pipe, plan.request):
            return
        self._learned[plan.request] += 1
        basis.learn(plan, trace, spread=self._device.runs_ahead)
