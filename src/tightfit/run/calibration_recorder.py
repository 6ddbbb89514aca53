"""Finished calls under a budget's plan → measurements, stored for the next plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tightfit.apply.latest_used import LatestUsed
from tightfit.devices.device import Device
from tightfit.measure.recorder import UNCOUNTED
from tightfit.run.calibration import MOST, PlanningInputs
from tightfit.run.call_arguments import request_of, shape_of
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.results import Trace

__all__ = ["CalibrationRecorder"]


class CalibrationRecorder:
    """Records measurements of calls on `device` whose requests were planned for.

    A call is recorded if it finished under one plan, had the request of that plan, and if its report has no notes
    (except that activations were not counted, which makes peaks too low to calibrate them). Not recorded are calls
    under torch's profiler, calls with a budget for several devices, and those after the first MOST of a request in one
    process, to save a service the time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._inputs_by_request = LatestUsed[Request, PlanningInputs]()
        self._recorded: Counter[Request] = Counter()

    def studies(self, plan: Plan, planning_inputs: PlanningInputs) -> None:
        """Set the inputs of `plan`, and of every other plan for the same request."""
        if plan.request is not None:
            self._inputs_by_request[plan.request] = planning_inputs

    def ended(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, trace: Trace) -> None:
        """Record a finished call of `pipe` with these arguments, which ran under `plan` throughout."""
        planning_inputs = self._inputs_by_request.get(plan.request) if plan.request else None
        if planning_inputs is None or plan.request is None or self._recorded[plan.request] == MOST:
            return
        if plan.budget is not None and plan.budget.devices:
            return  # a measurement describes a single device
        request = request_of(pipe, args, kwargs)
        disturbed = set(trace.notes) - {UNCOUNTED} or torch._C._autograd._profiler_enabled()
        if request is None or disturbed or shape_of(pipe, request) != shape_of(pipe, plan.request):
            return
        self._recorded[plan.request] += 1
        planning_inputs.learn(plan, trace, spread=self._device.runs_ahead)
