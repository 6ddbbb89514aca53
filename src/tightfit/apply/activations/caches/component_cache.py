"""The step cache of one component: what is kept for each of its guidance predictions, and which call skips."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.caches.branch_cache import BranchCache, kept_bytes
from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline
from tightfit.apply.activations.caches.filtered_input import FilteredInput, NotFilteredError
from tightfit.apply.activations.caches.guidance import ConditionalPrediction
from tightfit.apply.activations.caches.skippable_parts import skippable_parts
from tightfit.apply.activations.caches.step_changes import StepChanges
from tightfit.apply.activations.caches.step_counter import CallSequence, DenoiserCall, StepCounter, call_shapes
from tightfit.apply.activations.gradient_checkpointing import attention_layers
from tightfit.apply.method_overrides import override_class_members
from tightfit.apply.module_hooks import wrap
from tightfit.devices.device import Device
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.errors import CacheError
from tightfit.measure.modules import compiled_around
from tightfit.measure.recorder import Recorder
from tightfit.schema.step_cache import CacheTrace, StepCache

__all__ = ["ComponentCache"]


class ComponentCache:
    """Keeps what `network`, the component `name`, computes from step to step, as `settings` say.

    Everything is forgotten at the beginning and at the end of each call of the pipeline (`clear`).
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        settings: StepCache,
        device: Device,
        pipeline: DenoisingPipeline,
        leave_out: Callable[[Iterable[nn.Module], Iterable[nn.Module]], int],
        recorder: Recorder,
    ) -> None:
        """`leave_out` is called with the modules that the call in progress will not run, and those that the next one
        will not, and returns the bytes that were loaded in vain. Raises CacheError.
        """
        if network._compiled_call_impl is not None:
            raise CacheError(
                f"cache={settings.strategy}: {name} is compiled as a whole, and has no blocks to leave out"
            )
        self._name, self._settings, self._recorder = name, settings, recorder
        pool = ActivationHostPool(device) if settings.keep_on == "host" and device.separate else None
        self._pool, self._leaves_out = pool, leave_out
        self._conditional = ConditionalPrediction()
        self.modules, self._make = skippable_parts(
            name, network, settings, pool, self._leave_out, pipeline, self._conditional
        )
        self._filter = FilteredInput(settings, pipeline) if settings.kind.decides == "filtered input" else None
        self._counter, self._sequence = StepCounter(pipeline.steps), CallSequence()
        self._place: DenoiserCall | None = None  # of the network's call in progress
        self._forwards = 0  # forward passes in it
        self._branches: dict[Hashable, BranchCache] = {}
        self._now: BranchCache | None = None
        self._foretold = False  # whether it was said in the last call that this one leaves something out
        self._skipped: set[int] = set()
        self._changes: list[StepChanges] | None = None
        self.on_leave_out: Callable[[], object] = lambda: None  # is called when modules are left out
        self._in_vain = 0  # bytes of weights that were on the device, or on their way, when they were left out
        self._peaks = [0, 0]  # bytes that were kept on the device and in host memory

    def _leave_out(self, modules: Iterable[nn.Module]) -> None:
        """Say that the call in progress leaves out `modules`, and what the next one leaves out, if that is known."""
        now, then = tuple(modules), self._left_out_next()
        if now or then or self._foretold:
            self._in_vain += self._leaves_out(now, then)
        self._foretold = bool(then)
        if now:
            self.on_leave_out()

    def _left_out_next(self) -> tuple[nn.Module, ...]:
        assert self._place is not None
        key, following = self._sequence.next(self._place.steps)
        branch = self._branches.get(key)
        return () if branch is None or following is None else branch.left_out_by(following)

    def attach(self, network: nn.Module, undo: Callable[..., object]) -> None:
        """Take part in the calls of `network` and of its modules; `undo` receives how to stop that."""

        def around(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def run(*args: Any, **kwargs: Any) -> Any:
                if (now := self._now) is None or torch.is_grad_enabled():
                    return call(*args, **kwargs)
                if args and args[0] is module:  # called as a method of its class
                    return now.module(module, functools.partial(call, module), args[1:], kwargs)
                return now.module(module, call, args, kwargs)

            return run

        compiled = compiled_around(network)
        for module in self.modules:
            if module._compiled_call_impl is not None:
                wrap(module, functools.partial(around, module), undo)
            elif id(module) in compiled:
                raise CacheError(f"cache={self._settings.strategy}: parts of {self._name} inside a compiled module")
            else:
                undo(override_class_members(module, __call__=around(module, type(module).__call__)))
        for module, watch in self._watched():
            undo(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        members: dict[str, Any] = {"forward": self._forward(type(network).forward)}
        if (context := getattr(type(network), "cache_context", None)) is not None:
            members["cache_context"] = self._counter.naming(context)
        undo(override_class_members(network, **members))
        if self._pool is not None:
            undo(self._pool.close)
        undo(self.clear)

    def _watched(self) -> list[tuple[nn.Module, Callable[..., None]]]:
        """Modules whose inputs decide: the first attention of the first block, for "modulated" and filtered input."""
        settings = self._settings
        if settings.kind.decides not in ("modulated input", "filtered input") or not settings.decides_in_blocks:
            return []
        attention = next(iter(attention_layers(self.modules[0])), None)
        if attention is None:
            raise CacheError(f"cache={settings.strategy}: the first block of {self._name} has no attention layer")

        def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves = tree_leaves((kwargs.get("hidden_states"), args))
            seen = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
            if self._now is not None and seen is not None:
                filtering = self._filter
                self._decide(self._now, lambda: seen if filtering is None else filtering.tokens(seen))

        return [(attention, watch)]

    def _decide(self, branch: BranchCache, seen: Callable[[], torch.Tensor]) -> None:
        """Let `branch` decide by what `seen` returns."""
        if branch.failed is not None:
            return
        try:
            tensor = seen()
        except NotFilteredError as why:
            branch.fail(str(why))
        else:
            branch.decide(tensor)

    # calls

    def clear(self) -> None:
        """Forget everything: a call of the pipeline begins or ends."""
        self._forget(list(self._branches))
        self._counter.clear()
        self._sequence.clear()
        self._counter.context = None
        self._conditional.clear()
        if self._filter is not None:
            self._filter.clear()
        self._now = self._place = None

    def begin_call(self) -> None:
        """Begin a call of the pipeline."""
        self.clear()
        self._skipped.clear()
        self._in_vain = 0
        self._peaks = [0, 0]

    def trace(self) -> CacheTrace | None:
        """Return what the pipeline's call that has just ended left out; None if the component did not run."""
        if self._counter.steps_counted == 0:
            return None
        return CacheTrace(
            component=self._name,
            strategy=self._settings.strategy,
            steps=self._counter.steps_counted,
            skipped_steps=tuple(sorted(self._skipped)),
            device_bytes=self._peaks[0],
            host_bytes=self._peaks[1],
            loaded_in_vain=self._in_vain,
        )

    def calling(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `work`, the network's call with the network first: which step it belongs to is known within."""

        @functools.wraps(work)
        def run(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._place is not None:  # within its own call
                return work(network, *args, **kwargs)
            self._place, self._forwards = self._counter.count(network, args, kwargs), 0
            try:
                return work(network, *args, **kwargs)
            finally:
                self._place = None

        return run

    def kind_of_next(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return what tells the forward pass that is about to begin from others with arguments of the same shapes.

        For simulated tensors, whose values cannot decide.
        """
        if self._place is None:
            return None
        key = self._key(args, kwargs)
        branch = self._branches.get(key)
        return key[:2], None if branch is None else branch.outlook(self._place)

    def repeated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the forward pass that was about to begin is a repetition of one of the same kind."""
        assert self._place is not None
        key = self._key(args, kwargs)
        self._forwards += 1
        self._branches[key].repeat(self._place)
        self._note_call(self._branches[key], self._place)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
        assert self._place is not None
        return self._place.branch, self._forwards, call_shapes(args, kwargs)

    def _forward(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def run(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
            place = self._place
            if place is None or self._now is not None or torch.is_grad_enabled():
                return work(network, *args, **kwargs)
            key = self._key(args, kwargs)
            if not self._forwards:
                self._sequence.note(key, place)
            self._forwards += 1
            if key not in self._branches:
                self._forget([other for other in self._branches if other[:2] == key[:2]])  # type: ignore[index]
                self._branches[key] = self._made()
            branch = self._branches[key]
            return self._within(branch, place, functools.partial(work, network), network, args, kwargs)

        return run

    def _made(self) -> BranchCache:
        branch = self._make()
        if self._changes is not None:
            branch.changes = StepChanges()
            self._changes.append(branch.changes)
        return branch

    def observe(self) -> list[StepChanges]:
        """Return a list to which the changes of each guidance prediction of the calls to come are added."""
        self._changes = []
        return self._changes

    def _within(
        self, branch: BranchCache, place: DenoiserCall, work: Callable[..., Any], network: nn.Module,
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        sizes = kept_bytes(self._branches.values(), tree_leaves((args, kwargs)))
        self._peaks = [max(pair) for pair in zip(self._peaks, sizes, strict=True)]
        self._now = branch
        try:
            branch.begin(place, branch.foreseen(place))
            if not branch.skips:
                self._leave_out(())
            if self._filter is not None:
                self._filter.begin(network, args, kwargs, place)
                if not self._settings.decides_in_blocks:
                    self._decide(branch, self._filter.latents)
            output = branch.network(network, work, args, kwargs)
            branch.end()
        except BaseException:
            self._forget(list(self._branches))  # what is kept may be of half a call
            raise
        finally:
            self._now = None
            if self._filter is not None:
                self._filter.end()
        failed = None if branch.failed is None else f"no step is skipped, as {branch.failed}"
        for remark in filter(None, (branch.remark, failed)):
            self._recorder.note(f"{self._name}: {remark}")
        self._note_call(branch, place)
        return output

    def _note_call(self, branch: BranchCache, place: DenoiserCall) -> None:
        """Note whether a call skipped, and forget what is kept after the last step: what follows needs the memory."""
        if branch.skipped_last and not self._settings.lossless:
            self._skipped.add(place.step)
            for what in self._settings.lossy(self._name):
                self._recorder.lossy(what)
        if place.steps is not None and place.step >= place.steps - 1:
            self._forget([key for key, kept in self._branches.items() if kept is branch])

    def _forget(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._branches.pop(key).forget()
