"""Measurements of calls under a budget's plan: recorded, stored on disk, and used to calibrate the next plan."""

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


MOST = 8  # measured calls that are stored for a question, and recorded by one process for a request
_PASSING = {
    "name",
    "bytes",
    "free",
    "allocated",
    "expandable_refused",
}  # fields of an accelerator that do not affect its speed


def forget() -> None:
    """Delete the stored measurements of all calls."""
    with contextlib.suppress(OSError):
        for file in _folder().glob("*.json"):
            file.unlink()


class CalibrationStore:
    """Measurements of the last MOST calls of `question` on `device`. Nothing is stored if `question` is None."""

    def __init__(self, question: Mapping[str, Any] | None, device: Accelerator) -> None:
        self._file: Path | None = None
        if question is not None:
            import torch  # not needed to plan for a card that is not installed

            by = torch.get_num_threads() if device.is_cpu else torch.version.cuda
            asked = {"call": dict(question), "on": device.model_dump(mode="json", exclude=_PASSING), "by": by}
            self._file = _folder() / f"{key_of(asked)}.json"

    def read(self) -> tuple[CallMeasurement, ...]:
        """Return the stored measurements, oldest first; none if the file cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, TightfitError):
            kept = json.loads(self._file.read_text()) if self._file else []
            return tuple(CallMeasurement.from_mapping(fields) for fields in kept)
        return ()

    def add(self, experience: CallMeasurement) -> None:
        """Store `experience` and the latest earlier ones, MOST in all."""
        if self._file is None:
            return
        kept = [*self.read(), experience][-MOST:]
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._file) as partial:
                partial.write_text(json.dumps([each.to_mapping() for each in kept]))


class PlanningInputs(NamedTuple):
    """Inputs of the planner for one request."""

    footprint: Footprint  # as measured, before calibration
    machine: Machine  # with one accelerator, or with all that the budget names
    past: CalibrationStore
    call: Any = None  # arguments or log of the measured call; None: dummy arguments
    workings: SearchCaches | None = None  # intermediate results that successive plans share

    def missing(self, limits: Limits) -> tuple[str, ...]:
        """Return the parts that the footprint lacks and a plan within `limits` could benefit from."""
        budget, _, host = limits
        past = self.past.read()
        return find_missing(self.footprint, self.machine, budget, device=host, experiences=past, workings=self.workings)

    def plan(self, limits: Limits) -> Plan:
        """Make the plan within `limits`, calibrated by the stored measurements. Raises BudgetTooSmall."""
        budget, allow, host = limits
        past = self.past.read()
        return make_plan(
            self.footprint, self.machine, budget, allow, device=host, experiences=past, workings=self.workings
        )

    def time_scales(self, plan: Plan) -> dict[str, float]:
        """Return measured over predicted time of phases under `plan`, by name; factors of 1 are left out."""
        known = calibrate(self.footprint, self.past.read(), stored_in(plan)).footprint
        return {phase.name: phase.time_scale for phase in known.phases if phase.time_scale != 1}

    def learn(self, plan: Plan, trace: Trace, *, spread: bool) -> None:
        """Store the measurement in `trace` of a call under `plan`; `spread`: see `measurement_of`."""
        (known,) = self.machine.accelerators
        disk_rate = default_disk_rate(self.machine, known)
        self.past.add(measurement_of(self.footprint, plan, with_default_rates(known), trace, disk_rate, spread=spread))


def measured(
    measurer: Measurer, asked: Request, call: Any, limits: Limits, machine: Callable[[], Machine]
) -> PlanningInputs:
    """Measure the `call` with the request `asked` (None: with dummy arguments), as far as a plan within `limits` needs.

    `machine` is called after the measurement, because free memory may change meanwhile.
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
    """Records measurements of calls on `device` whose requests were planned for.

    A call is recorded if it finished under one plan, had the request of that plan, and if its report has no notes
    (except that activations were not counted, which makes peaks too low to calibrate them). Not recorded are calls
    under torch's profiler, calls with a budget for several devices, and those after the first MOST of a request in one
    process, to save a service the time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bases: dict[Request, PlanningInputs] = {}
        self._learned: Counter[Request] = Counter()

    def studies(self, plan: Plan, planning_inputs: PlanningInputs) -> None:
        """Set the inputs of `plan`, and of every other plan for the same request."""
        if plan.request is not None:
            self._bases[plan.request] = planning_inputs

    def ended(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, trace: Trace) -> None:
        """Record a finished call of `pipe` with these arguments, which ran under `plan` throughout."""
        planning_inputs = self._bases.get(plan.request) if plan.request else None
        if planning_inputs is None or plan.request is None or self._learned[plan.request] == MOST:
            return
        if plan.budget is not None and plan.budget.devices:
            return  # a measurement describes a single device
        asked = request_of(pipe, args, kwargs)
        disturbed = set(trace.notes) - {UNCOUNTED} or torch._C._autograd._profiler_enabled()
        if asked is None or disturbed or shape_of(pipe, asked) != shape_of(pipe, plan.request):
            return
        self._learned[plan.request] += 1
        planning_inputs.learn(plan, trace, spread=self._device.runs_ahead)
