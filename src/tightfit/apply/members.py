"""What overrides the methods and properties of a pipeline and of its components while they follow a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tightfit.apply.activations.attention_dispatch import AttentionDispatcher
from tightfit.apply.activations.caches.component_cache import ComponentCache
from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline
from tightfit.apply.activations.cfg_batching import batch_or_split
from tightfit.apply.activations.gradient_checkpointing import attention_layers
from tightfit.apply.activations.vae_tiling import wrap_vae_methods
from tightfit.apply.call_runner import CallRunner, PlanHandle
from tightfit.apply.context_parallel.executor import ContextParallel, parallel_call, parallel_methods
from tightfit.apply.copies import copying
from tightfit.apply.cross_device import CrossDeviceCall
from tightfit.apply.device_maps import device_map_members
from tightfit.apply.direct_calls import DirectCalls
from tightfit.apply.method_overrides import computing, while_followed
from tightfit.apply.session import Session
from tightfit.apply.switches import module_switches, pipeline_switches
from tightfit.apply.weights.device_offloaders import DeviceOffloaders
from tightfit.apply.weights.oom_retry import retry_on_oom
from tightfit.apply.weights.saved_weights import saving_members
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.measure.modules import HANDLE, compiled_around, find_role
from tightfit.schema.plan import ComponentPlan, Plan

__all__ = ["Members"]


class MembersHandle(PlanHandle, Protocol):
    """A pipeline's handle, which knows the ranks that follow its plan, too (None: there are none)."""

    parallel: ContextParallel | None


@dataclass(frozen=True)
class Members:
    """Makes the members of a pipeline on `device` and of its components, which follow `plan` by this `handle`.

    All keep `applied`, which undoes the plan: also a component that is only in another pipeline by now.
    """

    handle: MembersHandle
    applied: object
    plan: Plan
    device: Device
    calls: CallRunner
    places: DeviceOffloaders
    session: Session

    def of_component(self, name: str, module: nn.Module, device: Device, undo: ExitStack) -> dict[str, Any]:
        """Return the members of `module`, the component `name`, which runs on `device`."""
        cached = self._cache_steps(name, module, device, undo)
        role, original, session = find_role(name, module), type(module), self.session
        plan, calls, host = self.plan.components.get(name, ComponentPlan()), self.calls, self.device
        lossy, recorder, manager = plan.lossy(name), self.handle.recorder.of(device.name), self.places.of(name)
        dispatcher = AttentionDispatcher(plan.attention, device, lambda what: recorder.note(f"{name}: {what}"))
        attention = attention_layers(module)
        direct = DirectCalls(self.handle, calls, host, name, role)
        # compiled modules have chosen their attention kernels, and would be recompiled
        attends = plan.attention != "auto" or not compiled_around(module)

        def working(method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
            inner = CrossDeviceCall(host, device).around(inner) if device.separate or device is not host else inner
            inner = retry_on_oom(inner, lambda: manager.free_memory(name, ""))

            own = "__call__" if method == "forward" else method

            @functools.wraps(inner)
            def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if session.busy:
                    return work(self, *args, **kwargs)

                def once() -> Any:
                    return calls.once(lambda: work(self, *args, **kwargs), (name, method), attention, args, kwargs)

                return direct.run(self, once, lambda: getattr(self, own)(*args, **kwargs), args, kwargs)

            def work(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with session.work(name, role, method), dispatcher.working() if attends else nullcontext():
                    for what in lossy:
                        recorder.lossy(what)
                    if plan.compute_dtype:
                        return computing(functools.partial(inner, self), plan.compute_dtype, args, kwargs)
                    return inner(self, *args, **kwargs)

            return while_followed(run, own, lambda: session.over, calls.lock)

        def here() -> torch.device:
            """Its own code asks while it runs; else the pipeline does, which is on its own device like its tensors."""
            return (device if session.at_work(name) else host).torch_device

        def leave() -> None:
            if not session.at_work(name):
                manager.dismiss(name)

        members: dict[str, Any] = {**self._kept(), **batch_or_split(module, plan, recorder.note)}
        called = working("forward", cached(members.get("__call__", original.__call__)))
        busy = lambda: session.busy  # noqa: E731
        members["__call__"] = parallel_call(name, module, plan, self.handle.parallel, recorder, called, busy)
        if role == "autoencoder":
            methods = wrap_vae_methods(original, self.plan.vae, device, recorder, undo)
            if (ranks := self.handle.parallel) is not None and self.plan.vae.shared:
                methods = parallel_methods(name, original, methods, ranks, self.plan.vae, recorder)
            members |= {method: working(method, cut) for method, cut in methods.items()}
        if hasattr(original, "save_pretrained"):
            members |= saving_members(original)
        if hasattr(original, "device"):
            members["device"] = property(lambda _: here())
        members |= module_switches(name, original, here, leave, measured=calls.replans is not None)
        return members | copying(self.handle.set_aside)

    def _cache_steps(
        self, name: str, module: nn.Module, device: Device, undo: ExitStack
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Give `module`, the component `name`, the step cache that the plan wants; return what wraps its calls."""
        settings, handle = self.plan.components.get(name, ComponentPlan()).cache, self.handle
        if settings is None:
            return lambda call: call
        if handle.parallel is not None:
            raise PlanError(
                f"{name}: networks whose rows {self.plan.context} ranks share take no cache={settings.strategy}"
            )
        if (role := find_role(name, module)) != "denoiser":
            raise PlanError(f"{name} is no denoiser but an {role}: it has no steps for cache={settings.strategy}")

        plan = self.plan.components[name]
        pipeline = DenoisingPipeline(lambda: handle.pipe, whole_batches=not plan.splits_batch and plan.cfg != "batched")
        cache = ComponentCache(
            name, module, settings, device, pipeline,
            lambda *modules: self.places.leave_out(name, *map(tuple, modules)), handle.recorder.of(device.name),
        )  # fmt: skip
        cache.attach(module, undo.callback)
        self.session.caches[name] = cache
        return cache.calling

    def _kept(self) -> dict[str, Any]:
        return {HANDLE: self.handle, f"{HANDLE}_applied": self.applied}

    def of_pipeline(self, original: type) -> dict[str, Any]:
        """Return the members of a pipeline of the class `original`."""
        handle, calls, device = self.handle, self.calls, self.device.torch_device
        parallel, own = handle.parallel, self.device

        def on_ranks(*args: Any, **kwargs: Any) -> Any:
            ranks = handle.parallel  # of the plan that is followed by now
            assert ranks is not None
            run = functools.partial(original.__call__, *args, **kwargs)
            return ranks.noted(run, handle.recorder.note, handle.session)

        work = original.__call__ if parallel is None else on_ranks

        @functools.wraps(original.__call__)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with nullcontext() if parallel is None else parallel.call(own):
                return calls.make(handle, self, work, args, kwargs)

        here = property(lambda _: device)
        followed = while_followed(call, "__call__", lambda: not handle.fitted, calls.lock)
        members = {**self._kept(), "__call__": followed, "device": here, "_execution_device": here}
        members |= copying(handle.set_aside)
        # Cosmos 3 Omni's own would ask a weight
        members |= device_map_members(handle, original, self.plan) | pipeline_switches(original, device)
        return members | {"_get_execution_device": lambda _: device}
