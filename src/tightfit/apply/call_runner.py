"""Calls of a pipeline that follows a budget's plan: each under the plan that suits it, and on to its end."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tightfit.apply.output_replay import OutputReplayCache, RngState, without_frames
from tightfit.apply.session import Session
from tightfit.devices.device import Device
from tightfit.devices.memory import RamExceeded
from tightfit.devices.out_of_memory import is_out_of_memory
from tightfit.errors import BudgetTooSmall
from tightfit.measure.call_log import PassLog
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.measure.modules import find_components
from tightfit.plan.explain import differences
from tightfit.report.summary import Report
from tightfit.schema.plan import Plan
from tightfit.schema.results import Trace

__all__ = ["CallObserver", "CallRunner", "PlanHandle", "ReplannerProtocol"]

logger = logging.getLogger("tightfit")


class ReplannerProtocol(Protocol):
    """Who makes other plans for a pipeline."""

    def for_call(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], now: Plan) -> Plan | None:
        """The plan for a call with these arguments; None where the one that it follows `now` will do."""

    def for_held(self, pipe: Any, now: Plan, held: int) -> Plan:
        """The plan for the same call of a process that held so many bytes of RAM. Raises BudgetTooSmall."""

    def for_less(self, pipe: Any, now: Plan, free: Mapping[str, int], beside: Mapping[str, int]) -> Plan:
        """The plan for the same call within the bytes that are `free` of its devices. Raises BudgetTooSmall.

        `beside` is what other tensors of this process take of them.
        """

    def log_for(self, now: Plan, device: Device, activations: Callable[[], int]) -> PassLog | None:
        """What is to follow a call under `now`, where nobody could foresee what it does; see `PassLog`."""

    def logged(self, pipe: Any, now: Plan, log: PassLog) -> None:
        """A call under `now` came to its end, and `log` followed it."""


class CallObserver(Protocol):
    """Who learns from calls."""

    def ended(self, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, trace: Trace) -> None:
        """A call with these arguments came to its end, all of it under `plan`."""


class PlanHandle(Protocol):
    """A pipeline's handle: what it does now, and how it does something else."""

    plan: Plan
    devices: tuple[Device, ...]

    @property
    def recorder(self) -> JointRecorder: ...

    @property
    def session(self) -> Session: ...

    def follow(self, pipe: Any, plan: Plan) -> None: ...

    def report(self) -> Report: ...


class CallRunner:
    """One after another, on `device`; `replans` makes other plans where they are needed (None: nobody does)."""

    def __init__(self, device: Device, replans: ReplannerProtocol | None) -> None:
        self._device, self._replans = device, replans
        self.learner: CallObserver | None = None
        self._held = 0  # bytes of RAM in the last call, where they were too many at its end
        self._remarks: list[str] = []  # for the report
        self._before: list[Trace] = []  # of the call that is being made, until memory ran out
        self._log: PassLog | None = None  # of the call that is being made, where it is not foreseen
        self.finished = OutputReplayCache(device) if replans is not None else None

    def make(
        self, follower: PlanHandle, pipe: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """`call(pipe, *args, **kwargs)`, under another plan if it asks for something else, or memory runs out."""
        if follower.recorder.running:  # it is part of another
            return self._once(follower, pipe, call, args, kwargs)
        if self._replans is not None:
            self._suit(follower, self._replans, pipe, args, kwargs)
        suited = follower.plan
        if self._replans is None or self.finished is None:
            found = self._once(follower, pipe, call, args, kwargs)
        else:
            found = self._to_the_end(follower, self._replans, self.finished, pipe, call, args, kwargs)
        if follower.plan is suited:
            self._tell(follower, pipe, args, kwargs)
        return found

    def _to_the_end(
        self,
        follower: PlanHandle,
        replans: ReplannerProtocol,
        finished: OutputReplayCache,
        pipe: Any,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The call, made again under another plan where memory runs out."""
        finished.forget(follower.plan.schedule or ())
        draws, handled = RngState(kwargs, self._device), sys.exception()  # by who calls
        finished.active = True
        try:
            while True:
                try:
                    return self._once(follower, pipe, call, args, kwargs)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = without_frames(error, handled)
                self._before.append(follower.recorder.trace())
                self._make_do(follower, replans, pipe, failure)
                draws.rewind()
                finished.begin_again()
        finally:
            finished.active = False
            finished.forget()
            self._before.clear()

    def _tell(self, follower: PlanHandle, pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The learner is told of the call that is over: whatever comes of that, the call has come to its end."""
        if self.learner is not None:
            try:
                self.learner.ended(pipe, args, kwargs, follower.plan, follower.report().trace)
            except Exception:
                logger.warning("nothing was learned from this call", exc_info=True)

    def exceeded(self, held: int, during: bool) -> None:
        """This process held too many bytes of RAM, `during` a call: RamExceeded. After it: the next is planned anew."""
        if self.finished is None:
            return
        if during and self.finished.active:
            raise RamExceeded(held)
        self._held = held

    def remark(self, what: str) -> None:
        """The report of the next call says it."""
        self._remarks.append(what)

    def whole(self, trace: Trace) -> Trace:
        """`trace` of the call that is being made, and what came before memory ran out."""
        for before in reversed(self._before):
            trace = trace.after(before)
        return trace

    def _once(
        self, follower: PlanHandle, pipe: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        steps = kwargs.get("num_inference_steps")
        with follower.session.call(steps if isinstance(steps, int) else None), self._logging(follower, pipe):
            for remark in self._remarks:
                follower.recorder.note(remark)
            found = call(pipe, *args, **kwargs)
            self._remarks.clear()
            return found

    @contextlib.contextmanager
    def _logging(self, follower: PlanHandle, pipe: Any) -> Iterator[None]:
        """Passes of the call are logged, where it could not be foreseen."""
        if self._replans is None or self._log is not None:
            yield
            return
        recorder, session = follower.recorder, follower.session

        def activations() -> int:
            recorder.look()
            return recorder.live().activations

        self._log = log = self._replans.log_for(follower.plan, self._device, activations)
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, self, "_log", None)
            if log is not None:
                log.follow(find_components(pipe), session.at_work, undo)
            yield
        if log is not None:
            self._replans.logged(pipe, follower.plan, log)

    def once(self, work: Callable[[], Any], what: tuple[str, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What `work()` gives: the pass `what`, of a component and a method, which nothing else is inside of."""
        if self._log is not None:
            self._log.add(*what, args, kwargs)
        return work() if self.finished is None else self.finished.once(work, what)

    def _suit(
        self,
        follower: PlanHandle,
        replans: ReplannerProtocol,
        pipe: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if self._held:
            less = replans.for_held(pipe, follower.plan, self._held)
            self._follow(follower, pipe, less, f"{RamExceeded(self._held)}, in the call before: planned anew")
            self._held = 0
        before, after = follower.plan, replans.for_call(pipe, args, kwargs, follower.plan)
        if after is None or after.request is None:
            return
        if before.request is None:  # the first plan
            follower.follow(pipe, after)
        elif after.request == before.request:
            self._follow(follower, pipe, after, "planned by what the call before did")
        else:
            asked = f"planned anew for {after.request.described} (before: {before.request.described})"
            self._follow(follower, pipe, after, asked)

    def _make_do(self, follower: PlanHandle, replans: ReplannerProtocol, pipe: Any, failure: BaseException) -> None:
        """Memory ran out: another plan for what there is. Raises BudgetTooSmall."""
        for device in follower.devices:
            device.release_cache()
        try:
            if isinstance(failure, RamExceeded):
                after = replans.for_held(pipe, follower.plan, failure.held)
            else:
                after = replans.for_less(pipe, follower.plan, _free(follower), _beside(follower))
        except BudgetTooSmall as error:
            raise error from failure
        done = self.finished.count if self.finished else 0
        within = f" within {after.budget.described}" if after.budget else ""
        what = str(failure) if isinstance(failure, RamExceeded) else "out of memory"
        said = f"{what}: planned anew{within}, and went on after {done} passes that were done"
        self._follow(follower, pipe, after, said)

    def _follow(self, follower: PlanHandle, pipe: Any, after: Plan, said: str) -> None:
        changes = differences(follower.plan, after)
        self._remarks.append(f"{said}: {'; '.join(changes) or 'nothing else is done'}")
        if changes:
            follower.follow(pipe, after)
        follower.plan = after


def _free(follower: PlanHandle) -> dict[str, int]:
    """What there is of each device, by name, as if it had no weights of the pipeline."""
    return {each.name: each.free_bytes() + follower.recorder.of(each.name).weights for each in follower.devices}


def _beside(follower: PlanHandle) -> dict[str, int]:
    """What tensors of this process take of each device that counts them, by name, without the pipeline's weights."""
    allocated = {each.name: each.allocated_bytes() for each in follower.devices if each.separate}
    return {
        name: max(size - follower.recorder.of(name).weights, 0) for name, size in allocated.items() if size is not None
    }
