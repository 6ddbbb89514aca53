"""Plan + live modules → modules that follow the plan. All changes are made here; `undo()` reverts them, last first."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.component_settings import change_activations
from tightfit.apply.activations.memory_format import channels_last
from tightfit.apply.allocator_limits import limit_allocators
from tightfit.apply.applied_plan import AppliedPlan, collect_old_plans, fill_and_close, show_own_class
from tightfit.apply.call_runner import CallObserver, CallRunner, ReplannerProtocol
from tightfit.apply.changes import PipelineState
from tightfit.apply.choices import choices_of, decide
from tightfit.apply.context_parallel.executor import ContextParallel, check_ranks, parallel_forward, shares_weights
from tightfit.apply.cross_device import CrossDeviceCall
from tightfit.apply.members import Members
from tightfit.apply.method_overrides import exported, override_class_members, own_class
from tightfit.apply.module_hooks import watch
from tightfit.apply.network_split import split_network
from tightfit.apply.other_offloading import refuse_followers, refuse_offloaded
from tightfit.apply.plan_devices import devices_of
from tightfit.apply.replaced_offloading import put_back, replaced, replaced_names
from tightfit.apply.scheduler_tensors import bring_back
from tightfit.apply.session import Session
from tightfit.apply.weights.device_offloaders import DeviceOffloaders
from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.quantize import check_kinds, check_storage
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import RunError
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.measure.modules import HANDLE, find_components, find_parts
from tightfit.measure.recorder import LiveNumbers
from tightfit.measure.shared import give_owners
from tightfit.report.summary import Report
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.request import Request
from tightfit.schema.results import Trace

__all__ = ["Fitted", "apply_plan", "fit"]

logger = logging.getLogger("tightfit")


def fit(
    pipe: Any,
    *,
    level: int | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    request: Request | Mapping[str, Any] | None = None,
    device: str | torch.device | Device | None = None,
    count_activations: bool = True,
    parallel: ContextParallel | None = None,
) -> Fitted:
    """Make `pipe` run as a level or a plan says; `tightfit.fit` documents the arguments, and takes budgets too."""
    choices, target = choices_of(level, plan, device)
    parallel = parallel and parallel.as_asked(choices)
    choices |= {} if parallel is None else parallel.choices
    decided = decide(pipe, choices, request, target)
    fitted = apply_plan(pipe, decided, target, count_activations=count_activations, parallel=parallel)
    fitted.renews(lambda pipe: decide(pipe, choices, request, target))
    return fitted


def apply_plan(
    pipe: Any,
    plan: Plan,
    device: str | torch.device | Device | None = None,
    *,
    count_activations: bool = True,
    replans: ReplannerProtocol | None = None,
    parallel: ContextParallel | None = None,
) -> Fitted:
    """Make `pipe` follow `plan` exactly as it is. Raises AlreadyFitted or PlanError; then nothing is changed.

    `replans` makes other plans: for calls with another request, and after memory ran out. `parallel`: the ranks that
    share the rows of its networks, as many as `plan.context`.
    """
    check_storage(plan)
    check_ranks(plan, parallel)
    refuse_offloaded(pipe)
    earlier = getattr(pipe, HANDLE, None)
    refuse_followers(pipe, earlier)
    if earlier is not None:
        earlier.undo()
    target = choose_device(device or plan.device)

    def device_of(name: str) -> Device:
        chosen = plan.device_of(name)
        return target if chosen == plan.device else choose_device(chosen)

    with replaced(pipe):
        check_kinds(find_components(pipe), plan, device_of)
        return Fitted(pipe, plan, target, count_activations=count_activations, replans=replans, parallel=parallel)


class Fitted:
    """A pipeline that follows a plan. `undo()` restores it exactly as it was."""

    def __init__(
        self,
        pipe: Any,
        plan: Plan,
        device: Device,
        *,
        count_activations: bool = True,
        file_weights: FileBackedWeights | None = None,
        replans: ReplannerProtocol | None = None,
        parallel: ContextParallel | None = None,
    ) -> None:
        """`file_weights`: the weights that are only in files (None: none)."""
        self._device, self._recorder = device, JointRecorder(device, count_activations)
        self._calls, self.parallel = CallRunner(device, replans), parallel
        self._trace: Trace | None = None
        self._applied: Callable[[], AppliedPlan | None] = lambda: None
        self._uncap: Callable[[], object] = lambda: None
        self._renew: Callable[[Any], Plan] = replans.renew if replans is not None else lambda _: self.plan
        self.follow(pipe, plan, file_weights or FileBackedWeights())
        if names := replaced_names(pipe):
            self._calls.remark(f"{', '.join(names)}: undo() puts back the offloading of diffusers or accelerate")

    @torch.inference_mode(mode=False)  # weights that are made here are for gradients too
    def follow(self, pipe: Any, plan: Plan, file_weights: FileBackedWeights | None = None) -> None:
        """Make `pipe`, the same as before, follow `plan` instead; weights that both read from files stay in files."""
        collect_old_plans()
        before = self._applied()
        file_weights = file_weights or (FileBackedWeights() if before is None else before.file_weights)
        file_weights.keep_in_files = True
        try:
            self._leave()
        finally:
            file_weights.keep_in_files = False
        components, own, calls = find_components(pipe), own_class(pipe), self._calls
        alone = isinstance(pipe, nn.Module)  # no other component needs the device
        with ExitStack() as uncap, ExitStack() as undo:
            undo.callback(setattr, self, "_applied", lambda: None)
            if not alone:
                undo.callback(show_own_class, weakref.ref(pipe), file_weights)
            give_owners(components.values(), undo.callback)
            undo.callback(fill_and_close, file_weights, components.values())
            bring_back(pipe, undo.callback)
            file_weights.begin()
            if plan.device != getattr(self, "plan", plan).device:
                self._move(choose_device(plan.device))
            devices = devices_of(plan, self._device, self._recorder)
            self.plan, self.devices = plan, tuple(devices.values())
            self.parallel = self.parallel and self.parallel.following(plan)
            shares = shares_weights(self.parallel)
            places = DeviceOffloaders(plan, devices, self._recorder, file_weights, shares=shares)
            session = Session(places, self._recorder, self._finished, calls.exceeded, calls.lock, keeps=alone)
            applied = AppliedPlan(file_weights, places, session, undo)
            self._applied = weakref.ref(applied)
            members = Members(self, applied, plan, self._device, calls, places, session)
            limit_allocators(plan, devices, uncap, calls.remark)
            for name, module in components.items():
                self._fit_component(name, module, members, devices[plan.device_of(name)], applied)
            if not alone:
                override_class_members(pipe, own, **members.of_pipeline(own))
            undo.callback(session.close)
            applied.undo = undo.pop_all()
            self._uncap = release = weakref.finalize(applied, uncap.pop_all().close)
            release.atexit = False  # the driver may be unloaded by then
        places.settled()
        file_weights.tidy()
        self._state, self._pipe = PipelineState(pipe), weakref.ref(pipe)

    def keep_up(self, pipe: Any) -> None:
        """Follow a plan for the components that `pipe` has now, if they are others. Raises PlanError, AlreadyFitted."""
        measured = self._calls.replans is not None
        refuse_offloaded(pipe, measured=measured, replaced=False)
        if changes := self._state.changes(pipe, measured=measured):
            refuse_followers(pipe, self)
            self._leave()
            plan = self.plan
            try:
                plan = self._renew(pipe)
            finally:
                self.follow(pipe, plan)
            self._calls.remark(f"{', '.join(changes)}: planned anew")

    def _move(self, device: Device) -> None:
        """Run the pipeline on `device` from now on, by the next plan to follow."""
        self._device, self._recorder = device, JointRecorder(device, self._recorder.count_activations)
        self._calls.move(device)

    def _fit_component(
        self, name: str, module: nn.Module, members: Members, device: Device, applied: AppliedPlan
    ) -> None:
        """Apply layout, storage, placement and activation settings; then override methods and add hooks."""
        plan, undo, session = self.plan.components.get(name, ComponentPlan()), applied.undo, applied.session
        recorder = self._recorder.of(device.name)
        applied.file_weights.fill(module, applied.places.left_in_files(name, module))
        forward = exported(module, plan)  # before any change: it is checked against the module
        forward = forward or parallel_forward(name, module, self.parallel, recorder)
        if plan.channels_last:
            undo.callback(channels_last(module))
        applied.places.place(name, module, undo)
        change_activations(
            module, plan, device, recorder, undo, offloads=self.plan.offload_activations and not plan.split,
            recompute=lambda: session.recompute(name), replaced=bool(forward),
        )  # fmt: skip
        if forward:
            undo.callback(override_class_members(module, **forward))
        undo.callback(override_class_members(module, **members.of_component(name, module, device, undo)))
        if plan.split:
            split_network(module, plan, applied.places.devices_of(name), undo.callback)
        if device is not self._device:
            for child in module.children():
                crossing = CrossDeviceCall(self._device, device)
                crossing.watch(child, lambda: not session.at_work(name), undo.callback)
        for part in find_parts(name, module).values():
            watch(part, functools.partial(session.touch, name), None, undo.callback)

    def _finished(self, trace: Trace) -> None:
        self._trace = self._calls.whole(trace)
        logger.info(self.report().log_line())

    @property
    def fitted(self) -> bool:
        """Whether the pipeline still follows the plan."""
        return self._applied() is not None

    @property
    def session(self) -> Session:
        """The session, which is notified when calls and components begin and end."""
        return self._now.session

    @property
    def _now(self) -> AppliedPlan:
        applied = self._applied()
        if applied is None:
            raise RunError(f"no pipeline follows the plan for {self.plan.device} any more")
        return applied

    @property
    def pipe(self) -> Any:
        """The pipeline; None if nobody has it any more."""
        return self._pipe()

    @property
    def recorder(self) -> JointRecorder:
        """The recorder of memory and time; other code may report to it what it does on the device."""
        return self._recorder

    def live(self) -> LiveNumbers:
        """Return numbers of what the pipeline is doing now; may be called from another thread."""
        return self._recorder.live()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Undo the plan, and follow it again after the context. Raises RunError during a call."""
        with self._calls.lock:
            if (pipe := self.pipe) is None:
                raise RunError(f"the pipeline that followed the plan for {self.plan.device} is gone: undo() first")
            self._leave()
            try:
                yield
            finally:
                self.follow(pipe, self.plan)

    def renews(self, decide: Callable[[Any], Plan]) -> None:
        """Call `decide` for the plan of the pipeline when it has other components."""
        self._renew = decide

    def tell(self, learner: CallObserver) -> None:
        """Notify `learner` of each finished call from now on that ran under one plan."""
        self._calls.learner = learner

    def report(self) -> Report:
        """Return what was measured in the last call. Raises RunError before the first."""
        if self._trace is None:
            raise RunError("there is nothing to report yet: call the pipeline first")
        return Report(self.plan, self._trace)

    def undo(self) -> None:
        """Restore values, dtypes, devices, formats, methods and hooks exactly. Raises RunError during a call."""
        self._leave()
        put_back(self.pipe)

    @torch.inference_mode(mode=False)
    def _leave(self) -> None:
        """Undo the plan; offloading that it replaced stays off."""
        if self._recorder.running:
            raise RunError("undo() in the middle of a call: let it end first")
        with self._calls.lock:
            applied = self._applied()
            if applied is not None:
                applied.undo.close()
                self._uncap()
            if self._calls.finished and not (applied and applied.file_weights.keep_in_files):  # else a plan follows
                self._calls.finished.close()
