"""Measurements of calls under a budget's plan: stored on disk, and used to calibrate the next plan. No torch here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.errors import TightfitError
from tightfit.files import cache_folder, read_regular, replacing
from tightfit.plan.calibration import calibrate, measurement_of, stored_in
from tightfit.plan.default_rates import with_default_rates
from tightfit.plan.options import SearchCaches
from tightfit.plan.planner import find_missing, make_plan
from tightfit.run.answer_cache import key_of
from tightfit.run.limits import Limits
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.results import CallMeasurement, Trace
from tightfit.schema.step_cache import StepCache
from tightfit.schema.stores import default_store_rates

if TYPE_CHECKING:
    from tightfit.run.footprints import Measurer

__all__ = ["MOST", "CalibrationStore", "PlanningInputs", "forget", "measured"]


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
    """Measurements of the last MOST calls of `question` on `device`. Nothing is stored if `question` is None.

    As long as there are none, those of the question `instead` are read.
    """

    def __init__(
        self, question: Mapping[str, Any] | None, device: Accelerator, instead: Mapping[str, Any] | None = None
    ) -> None:
        self._file = None if question is None else _file_of(question, device)
        self._instead = None if instead in (None, question) else CalibrationStore(instead, device)

    def read(self) -> tuple[CallMeasurement, ...]:
        """Return the stored measurements, oldest first; none if the file cannot be read."""
        return self._own() or (() if self._instead is None else self._instead.read())

    def _own(self) -> tuple[CallMeasurement, ...]:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, TightfitError):
            kept = json.loads(read_regular(self._file)) if self._file else []
            return tuple(CallMeasurement.from_mapping(fields) for fields in kept)
        return ()

    def add(self, measurement: CallMeasurement) -> None:
        """Store `measurement` and the latest earlier ones, MOST in all."""
        if self._file is None:
            return
        kept = [*self._own(), measurement][-MOST:]
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
    cache: SearchCaches | None = None  # intermediate results that successive plans share
    step_cache: StepCache | None = None  # of the denoisers in the measured call

    def missing(self, limits: Limits) -> tuple[str, ...]:
        """Return the parts that the footprint lacks and a plan within `limits` could benefit from."""
        budget, host, device_map = limits.budget, limits.host, limits.device_map
        known: dict[str, Any] = {"device": host, "device_map": device_map, "cache": self.cache}
        return find_missing(self.footprint, self.machine, budget, measurements=self.past.read(), **known)

    def plan(self, limits: Limits) -> Plan:
        """Make the plan within `limits`, calibrated by the stored measurements. Raises BudgetTooSmall."""
        budget, allow, host, device_map = limits.budget, limits.allow, limits.host, limits.device_map
        known: dict[str, Any] = {"device": host, "device_map": device_map, "cache": self.cache}
        return make_plan(self.footprint, self.machine, budget, allow, measurements=self.past.read(), **known)

    def time_scales(self, plan: Plan) -> dict[str, float]:
        """Return measured over predicted time of phases under `plan`, by name; factors of 1 are left out."""
        known = calibrate(self.footprint, self.past.read(), stored_in(plan)).footprint
        return {phase.name: phase.time_scale for phase in known.phases if phase.time_scale != 1}

    def learn(self, plan: Plan, trace: Trace, *, spread: bool) -> None:
        """Store the measurement in `trace` of a call under `plan`; `spread`: see `measurement_of`."""
        (known,) = self.machine.accelerators
        store_rates = default_store_rates(self.machine, known)
        self.past.add(
            measurement_of(self.footprint, plan, with_default_rates(known), trace, store_rates, spread=spread)
        )


def measured(
    measurer: Measurer, request: Request, call: Any, limits: Limits, machine: Callable[[], Machine],
    step_cache: StepCache | None = None,
) -> PlanningInputs:  # fmt: skip
    """Measure the `call` with this `request` (None: with dummy arguments), as far as a plan within `limits` needs.

    `machine` is called after the measurement, because free memory may change meanwhile. Denoisers have `step_cache`.
    """
    cache, plain, measurer = SearchCaches(), measurer.with_cache(None), measurer.with_cache(step_cache)

    def planning_inputs(footprint: Footprint) -> PlanningInputs:
        current = machine()
        questions = measurer.question(request), plain.question(request)
        store = CalibrationStore(questions[0], current.accelerators[0], questions[1])
        return PlanningInputs(footprint, current, store, call, cache, step_cache)

    return planning_inputs(measurer.measure(request, call, lambda bare: planning_inputs(bare).missing(limits)))


def _file_of(question: Mapping[str, Any], device: Accelerator) -> Path:
    import torch  # not needed to plan for a card that is not installed

    by = torch.get_num_threads() if device.is_cpu else torch.version.cuda
    key = {"call": dict(question), "on": device.model_dump(mode="json", exclude=_PASSING), "by": by}
    return _folder() / f"{key_of(key)}.json"


def _folder() -> Path:
    return cache_folder() / "experiences"
