"""Plan + live modules → modules that follow the plan. All changes are made here; `undo()` reverts them, last first."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply.activations.activation_offload import offload_waiting_activations
from tightfit.apply.activations.attention_dispatch import AttentionDispatcher
from tightfit.apply.activations.cfg_batching import batch_or_split
from tightfit.apply.activations.ffn_chunking import chunk_feed_forwards
from tightfit.apply.activations.max_batch import chunk_blocks
from tightfit.apply.activations.memory_format import channels_last
from tightfit.apply.activations.vae_tiling import wrap_vae_methods
from tightfit.apply.allocator_limits import limit_allocators
from tightfit.apply.call_runner import CallObserver, CallRunner, ReplannerProtocol
from tightfit.apply.choices import choices_of, decide
from tightfit.apply.cross_device import CrossDeviceCall
from tightfit.apply.method_overrides import (
    cast_on_host,
    computing,
    exported,
    override_class_members,
    refused,
    while_followed,
)
from tightfit.apply.module_hooks import watch
from tightfit.apply.other_offloading import refuse_offloaded
from tightfit.apply.session import Session
from tightfit.apply.weights.device_offloaders import DeviceOffloaders
from tightfit.apply.weights.oom_retry import retry_on_oom
from tightfit.apply.weights.quantize import check_kinds, check_storage, left_in_files
from tightfit.apply.weights.stores import FileBackedWeights
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import AlreadyFitted, PlanError, RunError
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.measure.modules import HANDLE, compiled_around, find_components, find_parts, find_role, has_skips
from tightfit.measure.recorder import LiveNumbers, Recorder
from tightfit.measure.shared import give_owners
from tightfit.report.summary import Report
from tightfit.schema.footprint import Request
from tightfit.schema.plan import ComponentPlan, Plan
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
) -> Fitted:
    """Make `pipe` run as a level or a plan says; `tightfit.fit` documents the arguments, and takes budgets too."""
    choices, target = choices_of(level, plan, device)
    return apply_plan(pipe, decide(pipe, choices, request, target), target, count_activations=count_activations)


def apply_plan(
    pipe: Any,
    plan: Plan,
    device: str | torch.device | Device | None = None,
    *,
    count_activations: bool = True,
    replans: ReplannerProtocol | None = None,
) -> Fitted:
    """Make `pipe` follow `plan` exactly as it is. Raises AlreadyFitted or PlanError; then nothing is changed.

    `replans` makes other plans: for calls with another request, and after memory ran out.
    """
    check_storage(plan)
    refuse_offloaded(pipe)
    earlier = getattr(pipe, HANDLE, None)
    if earlier is not None:
        earlier.undo()
    for name, module in find_components(pipe).items():
        if hasattr(module, HANDLE):
            raise AlreadyFitted(
                f"{name} already follows the plan of another pipeline: undo() that one first", name=name
            )
    target = choose_device(device or plan.device)
    check_kinds(find_components(pipe), plan, lambda name: _device_of(name, plan, target))
    return Fitted(pipe, plan, target, count_activations=count_activations, replans=replans)


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
    ) -> None:
        """`file_weights`: the weights that are only in files (None: none)."""
        self._device, self._recorder = device, JointRecorder(device, count_activations)
        self._file_weights = file_weights or FileBackedWeights()
        self._calls = CallRunner(device, replans)
        self._trace: Trace | None = None
        self._undo: ExitStack | None = None
        self.follow(pipe, plan)

    def follow(self, pipe: Any, plan: Plan) -> None:
        """Make `pipe`, the same as before, follow `plan` instead; weights that both read from files stay in files."""
        self._file_weights.keep_in_files = True
        try:
            self.undo()
        finally:
            self._file_weights.keep_in_files = False
        components = find_components(pipe)
        with ExitStack() as undo:
            give_owners(components.values(), undo.callback)
            undo.callback(self._clear_file_weights, components.values())
            self._file_weights.begin()
            devices = self._devices_of(plan)
            self.plan, self.devices = plan, tuple(devices.values())
            self._places = DeviceOffloaders(plan, devices, self._recorder, self._file_weights)
            alone = isinstance(pipe, nn.Module)  # no other component needs the device
            self._session = Session(self._places, self._recorder, self._finished, self._calls.exceeded, keeps=alone)
            limit_allocators(plan, devices, undo, self._calls.remark)
            for name, module in components.items():
                chosen, device = plan.components.get(name, ComponentPlan()), devices[plan.device_of(name)]
                self._fit_component(name, module, chosen, device, undo)
            if not isinstance(pipe, nn.Module):
                undo.callback(override_class_members(pipe, **self._pipeline_members(type(pipe)), **{HANDLE: self}))
            undo.callback(self._session.close)
            self._undo = undo.pop_all()
        self._places.settled()
        self._file_weights.tidy()

    def _clear_file_weights(self, components: Iterable[nn.Module]) -> None:
        """Load the weights that are only in files, and close the files, unless another plan follows."""
        if not self._file_weights.keep_in_files:
            for module in components:
                self._file_weights.fill(module)
            self._file_weights.close()

    def _devices_of(self, plan: Plan) -> dict[str, Device]:
        """Return the devices on which components run by `plan`, by name, and set up a recorder for each."""
        devices = {name: self._device if name == plan.device else choose_device(name) for name in plan.devices}
        others = {name: device for name, device in devices.items() if device is not self._device}
        for name, device in devices.items():
            if others and device.allocated_bytes() is None:
                raise PlanError(f"several devices have to be cards, which count bytes: {name} is none", device=name)
        known = self._recorder.others
        self._recorder.others = {name: known.get(name) or Recorder(device) for name, device in others.items()}
        return devices

    def _fit_component(
        self, name: str, module: nn.Module, plan: ComponentPlan, device: Device, undo: ExitStack
    ) -> None:
        """Apply layout, storage, placement and activation settings of `plan`; then override methods and add hooks."""
        manager, recorder = self._places.of(name), self._recorder.of(device.name)
        self._file_weights.fill(module, left_in_files(module, plan, separate=device.separate))
        forward = exported(module, plan)  # before any change: it is checked against the module
        if plan.channels_last:
            undo.callback(channels_last(module))
        manager.store(name, module, plan, undo)
        manager.place(name, module, plan, undo)
        manager.stream(name, module, plan, undo)
        if plan.ffn_chunk is not None:
            chunk_feed_forwards(module, plan.ffn_chunk, undo)
        if plan.splits_batch and plan.placement == "stream":  # per block: weights are loaded once for all parts
            chunk_blocks(module, plan.max_batch, undo, recorder.note)
        if self.plan.offload_activations and has_skips(module) and not forward:
            offload_waiting_activations(module, device, recorder, undo)
        if forward:
            undo.callback(override_class_members(module, **forward))
        undo.callback(override_class_members(module, **self._component_members(name, module, plan, device, undo)))
        if device is not self._device:
            for child in module.children():
                crossing = CrossDeviceCall(self._device, device)
                crossing.watch(child, lambda: not self._session.at_work(name), undo.callback)
        for part in find_parts(name, module).values():
            watch(part, functools.partial(self._session.touch, name), None, undo.callback)

    def _component_members(
        self, name: str, module: nn.Module, plan: ComponentPlan, device: Device, undo: ExitStack
    ) -> dict[str, Any]:
        role, original, session = find_role(name, module), type(module), self._session
        lossy, calls, host = plan.lossy(name), self._calls, self._device
        recorder, manager = self._recorder.of(device.name), self._places.of(name)
        dispatcher = AttentionDispatcher(plan.attention, device, lambda what: recorder.note(f"{name}: {what}"))
        # compiled modules have chosen their attention kernels, and would be recompiled
        attends = plan.attention != "auto" or not compiled_around(module)

        def working(method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
            inner = CrossDeviceCall(host, device).around(inner) if device.separate or device is not host else inner
            inner = retry_on_oom(inner, lambda: manager.free_memory(name, ""))

            @functools.wraps(inner)
            def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if session.busy:
                    return work(self, *args, **kwargs)
                return calls.once(lambda: work(self, *args, **kwargs), (name, method), args, kwargs)

            def work(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with session.work(name, role, method), dispatcher.working() if attends else nullcontext():
                    for what in lossy:
                        recorder.lossy(what)
                    if plan.compute_dtype:
                        return computing(functools.partial(inner, self), plan.compute_dtype, args, kwargs)
                    return inner(self, *args, **kwargs)

            return while_followed(run, "__call__" if method == "forward" else method, lambda: session.over)

        members: dict[str, Any] = {HANDLE: self, **batch_or_split(module, plan, recorder.note)}
        members["__call__"] = working("forward", members.get("__call__", original.__call__))
        if role == "autoencoder":
            for method, cut in wrap_vae_methods(original, self.plan.vae, device, recorder, undo).items():
                members[method] = working(method, cut)
        if hasattr(original, "to"):
            members["to"] = cast_on_host(original.to, lambda: None if session.at_work(name) else manager.dismiss(name))
        if not plan.store.is_host_memory and hasattr(original, "save_pretrained"):
            members["save_pretrained"] = refused(name, plan.store.title)
        if hasattr(original, "device"):
            # its own code asks while it runs; else the pipeline does, which is on its own device like all its tensors
            members["device"] = property(lambda _: (device if session.at_work(name) else host).torch_device)
        return members

    def _pipeline_members(self, original: type) -> dict[str, Any]:
        fitted, device = self, self._device

        @functools.wraps(original.__call__)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return fitted._calls.make(fitted, self, original.__call__, args, kwargs)

        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise AlreadyFitted("this pipeline follows a plan, which says where its weights are: undo() before to()")

        here = property(lambda _: device.torch_device)
        followed = while_followed(call, "__call__", lambda: not self.fitted)
        others = {"_get_execution_device": lambda _: device.torch_device}  # Cosmos 3 Omni's own would ask a weight
        return others | {"__call__": followed, "to": to, "device": here, "_execution_device": here}

    def _finished(self, trace: Trace) -> None:
        self._trace = self._calls.whole(trace)
        logger.info(self.report().log_line())

    @property
    def fitted(self) -> bool:
        """Whether the pipeline still follows the plan."""
        return self._undo is not None

    @property
    def session(self) -> Session:
        """The session, which is notified when calls and components begin and end."""
        return self._session

    @property
    def recorder(self) -> JointRecorder:
        """The recorder of memory and time; other code may report to it what it does on the device."""
        return self._recorder

    def live(self) -> LiveNumbers:
        """Return numbers of what the pipeline is doing now; may be called from another thread."""
        return self._recorder.live()

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
        if self._recorder.running:
            raise RunError("undo() in the middle of a call: let it end first")
        if self._undo is not None:
            self._undo.close()
            self._undo = None
        if self._calls.finished is not None and not self._file_weights.keep_in_files:  # else another plan follows
            self._calls.finished.close()


def _device_of(name: str, plan: Plan, target: Device) -> Device:
    """Return the device on which component `name` runs by `plan`, whose own device is `target`."""
    chosen = plan.device_of(name)
    return target if chosen == plan.device else choose_device(chosen)
