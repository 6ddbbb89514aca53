"""A call of a pipeline under a budget's plan → another plan, if it needs one.

A copy of the unfitted pipeline without weights is kept, so that any call can be measured later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightfit.apply.latest_used import LatestUsed
from tightfit.devices.device import Device
from tightfit.errors import BudgetTooSmall, CacheError, RequestError
from tightfit.measure.call_log import CallLog
from tightfit.plan.forecast import taken_by_others
from tightfit.progress import showing
from tightfit.run.argument_values import Given
from tightfit.run.cache_choice import plan_with_cache
from tightfit.run.calibrated_caches import with_calibrations
from tightfit.run.calibration import PlanningInputs, measured
from tightfit.run.calibration_recorder import CalibrationRecorder
from tightfit.run.call_arguments import CallShape, given_to, guidance_of, request_of, shape_of
from tightfit.run.footprints import Measurer
from tightfit.run.kept_plans import is_within, offloads_nothing
from tightfit.run.plan_target import PlanTarget
from tightfit.run.planning_context import (
    PlannedFolder,
    bytes_on,
    machine_now,
    with_garbage_freed,
    with_less_taken,
    with_taken,
    within_group,
)
from tightfit.run.unmeasured import LEVEL, plan_direct_calls, plan_unmeasured, plan_until_called, with_reason
from tightfit.schema.machine import Budget, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.step_cache import StepCache
from tightfit.units import format_bytes

__all__ = ["Replanner"]

logger = logging.getLogger("tightfit")

LESS = 0.95  # of the predicted peak of a plan that ran out of memory: the most that the next one may need


class Replanner:
    """Makes plans for a pipeline, as it was when this was created, and one plan target.

    `made` is a plan that exists already, with its inputs. The `calibration_recorder` is given the inputs of each plan.
    """

    retries = True  # whether a call is made again, under another plan, when memory runs out
    keeps_whole = True  # whether a plan that offloads nothing is kept for smaller calls

    def __init__(self, pipe: Any, plan_target: PlanTarget, made: PlannedFolder | None = None) -> None:
        self._limits, self._devices = plan_target
        self._machine: Machine | None = None  # as before the pipeline followed any plan
        self.calibration_recorder = CalibrationRecorder(self._devices[0])
        self._backward: str | None = None  # as the first request says that names it
        self._look_at(pipe, plan_target)
        if made is not None and made.plan.request is not None:
            self._machine, self._backward = self._free_machine(), made.plan.request.backward
            shape = self._shape(pipe, made.plan.request)
            self._plans[shape] = made.plan
            if made.planning_inputs is not None:
                self._inputs_by_shape[shape] = made.planning_inputs
                self._resident_on(made.plan)
                self.calibration_recorder.studies(made.plan, made.planning_inputs)

    def _look_at(self, pipe: Any, plan_target: PlanTarget) -> None:
        self._own = {device.name: bytes_on(device, pipe) for device in self._devices}
        self._unmeasured = plan_unmeasured(pipe, plan_target)  # for calls that cannot be measured
        self._measurer = self._measurer_of(pipe, plan_target)
        self._machine = None
        self._limits = with_calibrations(plan_target.limits, pipe)
        self._inputs_by_shape = LatestUsed[CallShape, PlanningInputs]()
        self._plans = LatestUsed[CallShape, Plan]()
        self._logs: dict[CallShape, CallLog] = {}  # of finished calls that were not measured before
        self._tried: set[Request] = set()  # the requests of such calls

    def _shape(self, pipe: Any, request: Request) -> CallShape:
        """Return what a plan for `request` depends on: also its steps, where a step cache is chosen for as many."""
        shape = shape_of(pipe, request)
        steps = frozenset([("steps", request.steps)] if self._limits.may_choose_cache else [])
        return shape._replace(others=shape.others | steps)

    def _measurer_of(self, pipe: Any, plan_target: PlanTarget) -> Measurer | Exception:
        """Return a Measurer of `pipe`, or what prevents it, e.g. weights in a custom format."""
        try:
            return Measurer(pipe, expandable=plan_target.expandable)
        except Exception as error:  # raised by third-party code, which copying modules runs
            return error

    def renew(self, pipe: Any) -> Plan:
        """Measure `pipe`, which follows no plan, as it is now; return a plan until its next call is planned for."""
        self._look_at(pipe, PlanTarget(self._limits._replace(calibrations=None), self._devices))
        return self.first_plan(pipe)

    def first_plan(self, pipe: Any) -> Plan:
        """Return the plan of `pipe`, which follows none, until a call is planned for."""
        return plan_until_called(pipe, PlanTarget(self._limits, self._devices))

    def plan(self, pipe: Any, request: Request, given: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan for `request`, an earlier or a new one; level 3 if its call cannot be measured.

        `given` are the arguments of the call (None: dummy arguments). Raises BudgetTooSmall, and RequestError for an
        invalid request.
        """
        shape = self._shape(pipe, request)
        self._backward = self._backward or request.backward
        if shape not in self._plans:
            with showing("planning", getattr(pipe, "_progress_bar_config", {})):
                self._plans[shape] = self._new(request, shape, given)
        self._inputs_by_shape.get(shape)  # used, as the plan is
        return self._plans[shape]

    def _new(self, request: Request, shape: CallShape, given: Mapping[str, Any] | None) -> Plan:
        log = self._logs.pop(shape, None)
        known = self._inputs_by_shape.get(shape)
        call = log or self._call(given) or (known and known.call)
        unsure = set[bool]()  # whether footprints are from logs of calls

        def inputs_with(cache: StepCache | None) -> PlanningInputs:
            same = known if known is not None and known.step_cache == cache else None
            found = self._with_missing_parts(request, same) if same else self._planning_inputs(request, call, cache)
            unsure.add(found.footprint.from_call_log)
            return found

        try:
            plan, planning_inputs = plan_with_cache(self._limits, inputs_with)
        except BudgetTooSmall as error:
            if unsure != {True}:
                raise
            return self._level_3(request, error)
        except (CacheError, RequestError) as error:
            if isinstance(error, CacheError) or (given is None and request != Request()):
                raise
            return self._level_3(request, error)
        except Exception as error:  # raised by third-party code: pipelines, hooks, adapters
            return self._level_3(request, error)
        planning_inputs = planning_inputs._replace(cache=None)  # intermediate results of one plan take memory
        self._inputs_by_shape[shape] = planning_inputs
        self._resident_on(plan)
        self.calibration_recorder.studies(plan, planning_inputs)
        return plan

    def _call(self, given: Mapping[str, Any] | None) -> Given | None:
        return None if given is None else Given(given, self._devices[0].torch_device)

    def _level_3(self, request: Request, error: Exception) -> Plan:
        """Return the level 3 plan for `request`, whose call cannot be measured because of `error`."""
        logger.info("this call cannot be measured: %s", error)
        return with_reason(self._unmeasured, request, error)

    def _resident_on(self, plan: Plan) -> None:
        """With several devices, keep the pipeline on the device of `plan` in later plans."""
        if len(self._devices) > 1:
            self._limits = self._limits._replace(host=plan.device)

    def _planning_inputs(
        self, request: Request, call: Given | CallLog | None, cache: StepCache | None
    ) -> PlanningInputs:
        if isinstance(self._measurer, Exception):
            raise self._measurer
        return measured(self._measurer, request, call, self._limits, self._machine_once_free, cache)

    def _with_missing_parts(self, request: Request, planning_inputs: PlanningInputs) -> PlanningInputs:
        """`planning_inputs`, with those missing parts measured that a plan within the current limits needs."""
        if isinstance(self._measurer, Exception) or not planning_inputs.missing(self._limits):
            return planning_inputs
        missing = lambda bare: planning_inputs._replace(footprint=bare).missing(self._limits)  # noqa: E731
        measure = self._measurer.with_cache(planning_inputs.step_cache).measure
        return planning_inputs._replace(footprint=measure(request, planning_inputs.call, missing))

    def _machine_once_free(self) -> Machine:
        self._machine = self._machine or self._free_machine()
        return self._machine

    def _free_machine(self) -> Machine:
        """This computer as if the pipeline's weights were not loaded."""
        return with_less_taken(machine_now(*self._devices), self._own)

    def for_call(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], now: Plan) -> Plan | None:
        """Return the plan for a call of `pipe` with these arguments; None if the current plan `now` is for it.

        A plan that offloads nothing and splits nothing is also kept for calls that need no more than its own request. A
        pipeline that was fitted for backward passes has room for them in later plans too, where that fits.
        """
        request = request_of(pipe, args, kwargs)
        if request is None:
            return None
        requests = [request]
        if self._backward is not None:
            as_trained = {"backward": self._backward, "guidance": guidance_of(pipe, request)}
            requests.insert(0, request.model_copy(update=as_trained))
        shapes = [self._shape(pipe, each) for each in requests]
        if now.request is not None:
            planned = self._shape(pipe, now.request)
            known = planned in shapes and planned not in self._logs
            if known or (self.keeps_whole and offloads_nothing(now) and is_within(shapes[0], planned)):
                return None
        given = given_to(pipe, args, kwargs)
        for each in requests[:-1]:
            with contextlib.suppress(BudgetTooSmall):
                return self.plan(pipe, each, given)
        return self.plan(pipe, request, given)

    def for_direct_calls(self, now: Plan, because: str) -> Plan | None:
        """Return a plan for calls of components by themselves, with that reason; None where `now` is for them."""
        return plan_direct_calls(self._unmeasured, now, because)

    def log_for(self, now: Plan, device: Device, activations: Callable[[], int]) -> CallLog | None:
        """Return a log for a call that could not be measured beforehand, at its first time; else None."""
        unforeseen = now.request is not None and not now.forecast and now.level == LEVEL
        return CallLog(device.torch_device, activations) if unforeseen and now.request not in self._tried else None

    def logged(self, pipe: Any, now: Plan, log: CallLog) -> None:
        """Store the `log` of a finished call: the next call of this kind is planned from it."""
        assert now.request is not None
        shape = self._shape(pipe, now.request)
        self._tried.add(now.request)
        self._logs[shape] = log
        self._plans.pop(shape, None)

    def for_held(self, pipe: Any, now: Plan, held: int) -> Plan:
        """Return another plan for the request of `now`, under which the process held `held` bytes of RAM.

        The excess over the prediction counts as taken from now on, and at least 5 % of the predicted peak. What its
        control group has left now is all that there is. Raises BudgetTooSmall.
        """
        assert now.request is not None
        shape, predicted = self._shape(pipe, now.request), now.predicted_peak(now.device)
        if shape not in self._inputs_by_shape:
            raise _nothing_less(now, held)
        planning_inputs = self._inputs_by_shape[shape]
        machine = with_garbage_freed(planning_inputs.machine, self._devices[0], pipe)
        more = max(held - (machine.ram_used or 0) - predicted, int(predicted * (1 - LESS)), 1)
        machine = within_group(with_less_taken(machine, {now.device: -more}))
        planning_inputs = self._inputs_by_shape[shape] = self._with_missing_parts(
            now.request, planning_inputs._replace(machine=machine)
        )
        plan = planning_inputs.plan(self._limits)
        self._use_machine(machine)
        self._plans.clear()
        self._plans[shape] = plan
        self.calibration_recorder.studies(plan, self._inputs_by_shape[shape])
        return plan

    def _use_machine(self, machine: Machine) -> Machine:
        """Make later plans for `machine`, and return it."""
        self._machine = machine
        for shape, known in list(self._inputs_by_shape.items()):
            self._inputs_by_shape[shape] = known._replace(machine=machine)
        return machine

    def for_less(self, pipe: Any, now: Plan, free: Mapping[str, int], beside: Mapping[str, int]) -> Plan:
        """Return another plan for the request of `now`, within the `free` bytes of its devices, by name.

        On devices with less free than `now` needs, or on all if there are none, it also needs at least 5 % less than
        `now`. Later plans have the same limits, unless there is no such plan: BudgetTooSmall. Bytes of other tensors,
        `beside`, are part of a budget.
        """
        assert now.request is not None
        if not now.forecast:
            raise _nothing_less(now, min(free.values()))
        predicted = {name: now.predicted_peak(name) for name in free}
        short = [name for name, size in free.items() if size < predicted[name]] or list(free)
        sizes = {name: min(size, int(predicted[name] * LESS)) if name in short else size for name, size in free.items()}
        limits, known = self._limits, self._inputs_by_shape[self._shape(pipe, now.request)].machine
        machine = self._use_machine(with_taken(known, beside))
        others = {each.name: taken_by_others(each) for each in machine.accelerators}
        budget = self._limits.budget or Budget(device=1)
        if budget.devices:
            whole = {name: sizes[name] + others.get(name, 0) for name in sizes}
            less = {name: max(min(size, whole.get(name, size)), 1) for name, size in budget.devices.items()}
            budget = budget.model_copy(update={"devices": less})
        else:
            budget = budget.model_copy(update={"device": max(sizes[now.device] + others.get(now.device, 0), 1)})
        self._limits = self._limits._replace(budget=budget)
        self._plans.clear()
        try:
            return self.plan(pipe, now.request)
        except BudgetTooSmall:
            self._limits = limits
            self._use_machine(known)
            raise


def _nothing_less(now: Plan, size: int) -> BudgetTooSmall:
    """The error for a plan without a forecast, which cannot be made smaller."""
    why = now.reasons[0].because if now.reasons else ""
    return BudgetTooSmall(
        f"{format_bytes(size)} on {now.device} are not enough for level 3, and no plan for less can be made: {why}",
        available_bytes=size,
    )
