"""Calls of a pipeline under a budget: a plan for each request, and another plan and a retry when memory runs out."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tightfit.apply.activations.gradient_checkpointing import may_record
from tightfit.apply.call_lock import CallLock
from tightfit.apply.callbacks import raised_by
from tightfit.apply.output_replay import OutputReplayCache, RngState, without_frames
from tightfit.apply.session import Session
from tightfit.devices.device import Device
from tightfit.devices.memory import RamExceeded, is_out_of_memory, trim_heap
from tightfit.errors import BudgetTooSmall
from tightfit.measure.call_log import CallLog
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.measure.modules import find_components
from tightfit.plan.explain import differences
from tightfit.report.summary import Report
from tightfit.schema.plan import Plan
from tightfit.schema.results import Trace

__all__ = ["CallObserver", "CallRunner", "PlanHandle", "ReplannerProtocol"]

logger = logging.getLogger("tightfit")


class ReplannerProtocol(Protocol):
    """Makes other plans for a pipeline; `retries`: whether a call is made again under one when memory runs out."""

    retries: bool

    def renew(self, pipe: Any) -> Plan:
        """Measure `pipe`, which follows no plan, as it is now; return a plan until its next call is planned for."""

    def for_call(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], now: Plan) -> Plan | None:
        """Return the plan for a call with these arguments; None where the current plan, `now`, suits it."""

    def for_direct_calls(self, now: Plan, because: str) -> Plan | None:
        """Return a plan for calls of components by themselves, with that reason; None where `now` is for them."""

    def for_held(self, pipe: Any, now: Plan, held: int) -> Plan:
        """Return the plan for the same call, given that the process held `held` bytes of RAM. Raises BudgetTooSmall."""

    def for_less(self, pipe: Any, now: Plan, free: Mapping[str, int], beside: Mapping[str, int]) -> Plan:
        """Return the plan for the same call within `free` bytes of each device, by name. Raises BudgetTooSmall.

        `beside`: bytes that other tensors of this process take on each device, by name.
        """

    def log_for(self, now: Plan, device: Device, activations: Callable[[], int]) -> CallLog | None:
        """Return a `PassLog` to record a call under `now` that could not be predicted; None for other calls."""

    def logged(self, pipe: Any, now: Plan, log: CallLog) -> None:
        """Handle the end of a call under `now` that `log` recorded."""


class CallObserver(Protocol):
    """Receives the measurements of finished calls."""

    def ended(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, trace: Trace) -> None:
        """Handle the end of a call with these arguments, all of which ran under `plan`."""


class PlanHandle(Protocol):
    """A pipeline's handle: its current plan, and how to follow another one."""

    plan: Plan
    devices: tuple[Device, ...]

    @property
    def pipe(self) -> Any: ...

    @property
    def recorder(self) -> JointRecorder: ...

    @property
    def session(self) -> Session: ...

    @property
    def fitted(self) -> bool: ...

    def keep_up(self, pipe: Any) -> None: ...

    def set_aside(self) -> contextlib.AbstractContextManager[None]: ...

    def follow(self, pipe: Any, plan: Plan) -> None: ...

    def report(self) -> Report: ...

    def undo(self) -> None: ...


class CallRunner:
    """Runs a pipeline's calls on `device`, one after another; `replans` makes other plans (None: the plan is fixed)."""

    def __init__(self, device: Device, replans: ReplannerProtocol | None) -> None:
        self._device, self.replans = device, replans
        self.lock: contextlib.AbstractContextManager[Any] = device.call_lock or CallLock()  # held by each call
        self.learner: CallObserver | None = None
        self._held = 0  # bytes of RAM at the end of the last call, if above the limit; else 0
        self._remarks: list[str] = []  # notes for the next call's report
        self._before: list[Trace] = []  # of the current call's attempts that ran out of memory
        self._log: CallLog | None = None  # of the current call, if it could not be predicted
        self.finished = OutputReplayCache(device) if replans is not None else None

    def make(
        self, handle: PlanHandle, pipe: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return `call(pipe, *args, **kwargs)`, replanned if its request is another, or if memory runs out.

        Other threads' calls wait for the lock, so a call while another is running is nested in that.
        """
        if handle.recorder.running:
            return self._once(handle, pipe, call, args, kwargs)
        handle.keep_up(pipe)
        if self.replans is None or self.finished is None:
            found = self._once(handle, pipe, call, args, kwargs)
            self._tell(handle, pipe, args, kwargs)
            return found
        self._replan_for_request(handle, self.replans, pipe, args, kwargs)
        suited = handle.plan
        found = self._to_the_end(handle, self.replans, self.finished, pipe, call, args, kwargs)
        if handle.plan is suited:
            self._tell(handle, pipe, args, kwargs)
        trim_heap()  # else free memory between tensors grows, call by call
        return found

    def _to_the_end(
        self,
        handle: PlanHandle,
        replans: ReplannerProtocol,
        finished: OutputReplayCache,
        pipe: Any,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the call, and retry it under another plan each time memory runs out."""
        finished.forget(handle.plan.schedule or ())
        rng_state, handled = RngState(kwargs, self._device), sys.exception()  # an error that the caller handles
        finished.active = True
        try:
            while True:
                try:
                    return self._once(handle, pipe, call, args, kwargs)
                except RuntimeError as error:
                    if not (replans.retries and is_out_of_memory(error)) or raised_by((*args, *kwargs.values()), error):
                        raise
                    failure = without_frames(error, handled)
                self._before.append(handle.recorder.trace())
                self._replan_after_oom(handle, replans, pipe, failure)
                rng_state.rewind()
                finished.begin_again()
        finally:
            finished.active = False
            finished.forget()
            self._before.clear()

    def _tell(self, handle: PlanHandle, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notify the learner of the finished call. Its errors are only logged: the call itself has succeeded."""
        if self.learner is not None:
            try:
                self.learner.ended(pipe, args, kwargs, handle.plan, handle.report().trace)
            except Exception:
                logger.warning("nothing was learned from this call", exc_info=True)

    def move(self, device: Device) -> None:
        """Run the calls on `device` from now on."""
        self._device, self.finished = device, self.finished and OutputReplayCache(device)

    def exceeded(self, held: int, during: bool) -> None:
        """Handle `held` bytes of RAM, above the limit: raise RamExceeded `during` a call, replan the next after one."""
        if self.finished is not None:
            if during and self.finished.active:
                raise RamExceeded(held)
            self._held = held

    def remark(self, what: str) -> None:
        """Add a note to the report of the next call."""
        self._remarks.append(what)

    def whole(self, trace: Trace) -> Trace:
        """Return `trace` of the current call, joined with the traces of its attempts that ran out of memory."""
        for before in reversed(self._before):
            trace = trace.after(before)
        return trace

    def _once(
        self, handle: PlanHandle, pipe: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        steps = kwargs.get("num_inference_steps")
        with handle.session.call(steps if isinstance(steps, int) else None), self._logging(handle, pipe):
            for remark in self._remarks:
                handle.recorder.note(remark)
            found = call(pipe, *args, **kwargs)
            self._remarks.clear()
            return found

    @contextlib.contextmanager
    def _logging(self, handle: PlanHandle, pipe: Any) -> Iterator[None]:
        """Log the component calls of a call that could not be predicted."""
        if self.replans is None or self._log is not None:
            yield
            return
        recorder, session = handle.recorder, handle.session

        def activations() -> int:
            recorder.sample()
            return recorder.live().activations

        self._log = log = self.replans.log_for(handle.plan, self._device, activations)
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, self, "_log", None)
            if log is not None:
                log.follow(find_components(pipe), session.at_work, undo)
            yield
        if log is not None:
            self.replans.logged(pipe, handle.plan, log)

    def once(
        self,
        work: Callable[[], Any],
        what: tuple[str, str],
        attention: Sequence[nn.Module],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `work()`, an outermost call of a component's method (`what`), or its output if it is kept.

        It is kept unless it has a graph, or the component's `attention` layers may record what they see.
        """
        if self._log is not None:
            self._log.add(*what, args, kwargs)
        if self.finished is None or not self.finished.active:
            return work()
        keeps = not torch.is_grad_enabled() and not may_record(attention)
        return self.finished.once(work, what, keeps=keeps)

    def _replan_for_request(
        self, handle: PlanHandle, replans: ReplannerProtocol, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if self._held:
            less = replans.for_held(pipe, handle.plan, self._held)
            self._follow(handle, pipe, less, f"{RamExceeded(self._held)}, in the call before: planned anew")
            self._held = 0
        before, after = handle.plan, replans.for_call(pipe, args, kwargs, handle.plan)
        if after is None or after.request is None:
            return
        if before.request is None:  # the first plan
            handle.follow(pipe, after)
        elif after.request == before.request:
            self._follow(handle, pipe, after, "planned by what the call before did")
        else:
            asked = f"planned anew for {after.request.described} (before: {before.request.described})"
            self._follow(handle, pipe, after, asked)

    def _replan_after_oom(
        self, handle: PlanHandle, replans: ReplannerProtocol, pipe: Any, failure: BaseException
    ) -> None:
        """Follow another plan, for the memory that is free, after memory ran out. Raises BudgetTooSmall."""
        for device in handle.devices:
            device.release_cache()
        try:
            if isinstance(failure, RamExceeded):
                after = replans.for_held(pipe, handle.plan, failure.held)
            else:
                after = replans.for_less(pipe, handle.plan, _free(handle), _beside(handle))
        except BudgetTooSmall as error:
            raise error from failure
        done = self.finished.count if self.finished else 0
        within = f" within {after.budget.described}" if after.budget else ""
        what = str(failure) if isinstance(failure, RamExceeded) else "out of memory"
        said = f"{what}: planned anew{within}, and went on after {done} passes that were done"
        self._follow(handle, pipe, after, said)

    def _follow(self, handle: PlanHandle, pipe: Any, after: Plan, said: str) -> None:
        changes = differences(handle.plan, after)
        self._remarks.append(f"{said}: {'; '.join(changes) or 'nothing else is done'}")
        if changes:
            handle.follow(pipe, after)
        handle.plan = after


def _free(handle: PlanHandle) -> dict[str, int]:
    """Return the free bytes of each device, by name, as if the pipeline's weights were not on it."""
    return {each.name: each.free_bytes() + handle.recorder.of(each.name).weights for each in handle.devices}


def _beside(handle: PlanHandle) -> dict[str, int]:
    """Return the bytes that this process allocated on each device that counts them, by name, without the weights."""
    allocated = {each.name: each.allocated_bytes() for each in handle.devices if each.separate}
    return {n: max(size - handle.recorder.of(n).weights, 0) for n, size in allocated.items() if size is not None}
