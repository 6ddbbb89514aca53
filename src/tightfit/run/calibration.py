"""What calls under a budget's plan were like: recorded, kept on disk, and used by the next plan."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tightfit.devices.device import Device
from tightfit.errors import TightfitError
from tightfit.files import cache_folder, replacing
from tightfit.measure.recorder import UNCOUNTED
from tightfit.plan.calibration import calibrate, measurement_of, stored_in
from tightfit.plan.default_rates import default_disk_rate, with_default_rates
from tightfit.plan.planner import find_missing, make_plan
from tightfit.plan.search_cache import SearchCaches
from tightfit.run.answer_cache import key_of
from tightfit.run.call_arguments import request_of, shape_of
from tightfit.run.plan_options import Limits
from tightfit.schema.footprint import Footprint, Request
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.results import CallMeasurement, Trace

if TYPE_CHECKING:
    from tightfit.run.footprints import Measurer

__all__ = ["MOST", "CalibrationRecorder", "CalibrationStore", "PlanningInputs", "forget", "measured"]


MOST = 8  # calls that are kept
_PASSING = {
    "name",
    "bytes",
    "free",
    "allocated",
    "expandable_refused",
}  # of an accelerator: what is no part of how fast it is


def forget() -> None:
    """Nothing that was learned from calls is known any more."""
    with contextlib.suppress(OSError):
        for file in _folder().glob("*.json"):
            file.unlink()


class CalibrationStore:
    """The last calls of what `question` asks for, on `device`. None of a question that nobody keeps answers to."""

    def __init__(self, question: Mapping[str, Any] | None, device: Accelerator) -> None:
        self._file: Path | None = None
        if question is not None:
            import torch  # a plan for a card that is not there needs none

            by = torch.get_num_threads() if device.is_cpu else torch.version.cuda
            asked = {"call": dict(question), "on": device.model_dump(mode="json", exclude=_PASSING), "by": by}
            self._file = _folder() / f"{key_of(asked)}.json"

    def read(self) -> tuple[CallMeasurement, ...]:
        """From the oldest to the newest."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, TightfitError):
            kept = json.loads(self._file.read_text()) if self._file else []
            return tuple(CallMeasurement.from_mapping(fields) for fields in kept)
        return ()

    def add(self, experience: CallMeasurement) -> None:
        """Keeps it; of those before, as many as there is room for."""
        if self._file is None:
            return
        kept = [*self.read(), experience][-MOST:]
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._file) as partial:
                partial.write_text(json.dumps([each.to_mapping() for each in kept]))


class PlanningInputs(NamedTuple):
    """What plans are made from."""

    footprint: Footprint  # as it was measured
    machine: Machine  # with one accelerator, or with all that the budget names
    past: CalibrationStore
    call: Any = None  # that was measured; None: one that was made up
    workings: SearchCaches | None = None  # what is worked out for one of its plans and serves the next

    def missing(self, limits: Limits) -> tuple[str, ...]:
        """What the footprint left out and a plan within `limits` could gain by."""
        budget, _, host = limits
        past = self.past.read()
        return find_missing(self.footprint, self.machine, budget, device=host, experiences=past, workings=self.workings)

    def plan(self, limits: Limits) -> Plan:
        """The plan within `limits`, by all that was learned. Raises BudgetTooSmall."""
        budget, allow, host = limits
        past = self.past.read()
        return make_plan(
            self.footprint, self.machine, budget, allow, device=host, experiences=past, workings=self.workings
        )

    def time_scales(self, plan: Plan) -> dict[str, float]:
        """How many times as long as rates say phases take under `plan`, by name, where that is not once."""
        known = calibrate(self.footprint, self.past.read(), stored_in(plan)).footprint
        return {phase.name: phase.time_scale for phase in known.phases if phase.time_scale != 1}

    def learn(self, plan: Plan, trace: Trace, *, spread: bool) -> None:
        """Keeps what `trace` teaches of a call under `plan`; `spread`: see `measurement_of`."""
        (known,) = self.machine.accelerators
        disk_rate = default_disk_rate(self.machine, known)
        self.past.add(measurement_of(self.footprint, plan, with_default_rates(known), trace, disk_rate, spread=spread))


def measured(
    measurer: Measurer, asked: Request, call: Any, limits: Limits, machine: Callable[[], Machine]
) -> PlanningInputs:
    """What a plan within `limits` is made from, for the `call` that asks for this (None: one that is made up).

    `machine` is asked when the call was measured: what is free may change meanwhile.
    """

    workings = SearchCaches()

    def planning_inputs(footprint: Footprint) -> PlanningInputs:
        there = machine()
        return PlanningInputs(
            footprint, there, CalibrationStore(measurer.question(asked), there.accelerators[0]), call, workings
        )

    return planning_inputs(measurer.measure(asked, call, lambda bare: planning_inputs(bare).missing(limits)))


def _folder() -> Path:
    return cache_folder() / "experiences"


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

    def studies(self, plan: Plan, planning_inputs: PlanningInputs) -> None:
        """`plan` was made from `planning_inputs`, and so is any other for the same request."""
        if plan.request is not None:
            self._bases[plan.request] = planning_inputs

    def ended(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, trace: Trace) -> None:
        """A call of `pipe` with these arguments, all of it under `plan`, is over."""
        planning_inputs = self._bases.get(plan.request) if plan.request else None
        if planning_inputs is None or plan.request is None or self._learned[plan.request] == MOST:
            return
        if plan.budget is not None and plan.budget.devices:
            return  # of which device would that be true?
        asked = request_of(pipe, args, kwargs)
        disturbed = set(trace.notes) - {UNCOUNTED} or torch._C._autograd._profiler_enabled()
        if asked is None or disturbed or shape_of(pipe, asked) != shape_of(pipe, plan.request):
            return
        self._learned[plan.request] += 1
        planning_inputs.learn(plan, trace, spread=self._device.runs_ahead)
