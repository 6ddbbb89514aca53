"""Events of a running pipeline: which component runs, in which phase, and which is evicted for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.apply.activations.caches.component_cache import ComponentCache
from tightfit.apply.activations.sdpa_patch import AttentionHandler, current_handlers, set_handlers
from tightfit.apply.weights.device_offloaders import DeviceOffloaders
from tightfit.apply.weights.gradients import in_backward
from tightfit.apply.weights.placed_groups import HostBytes
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.measure.passes import find_phase
from tightfit.measure.recorder import Recorder
from tightfit.schema.footprint import Role
from tightfit.schema.results import Trace

__all__ = ["Session"]


class Session:
    """Handles the begin and end of calls and components; notifies the recorder and the offload managers.

    One call at a time: another thread's call waits. With `keeps`, weights stay on the device between calls.
    """

    def __init__(
        self,
        places: DeviceOffloaders,
        recorder: Recorder,
        done: Callable[[Trace], None],
        exceeded: Callable[[int, bool], None],
        lock: contextlib.AbstractContextManager[Any],
        *,
        keeps: bool = False,
    ) -> None:
        """`done` is called with the trace of each call; `exceeded` with the bytes of RAM that the process held, if
        above the limit, and whether the call is still running; `lock` is held during a call.
        """
        self._places = places
        self._recorder = recorder
        self._done, self._exceeded = done, exceeded
        self._keeps = keeps
        self._lock = lock
        self._calls = 0  # calls running: 0 or 1
        self._clean = True  # whether the last call was cleaned up
        self.caches: dict[str, ComponentCache] = {}  # step caches, by component
        self.over = False  # whether the pipeline follows another plan, or none, by now
        self._working: list[str] = []
        self._attenders: tuple[AttentionHandler, ...] = ()

    @contextlib.contextmanager
    def call(self, steps: int | None = None) -> Iterator[None]:
        """Run one call of the pipeline with `steps` steps (None: its default); a nested call is part of the outer."""
        with self._lock:
            if self._calls:
                yield
                return
            if not self._clean:  # cleaning up after the last call was interrupted
                self._clear()
            self._attenders = current_handlers()  # of the outer call of another pipeline, if any
            self._calls, self._clean = 1, False
            try:
                self._places.begin(steps)
                for cache in self.caches.values():
                    cache.begin_call()
                with self._recorder.call():
                    yield
                    self._tell(self._places.end(), during=False)
                    kept = tuple(found for cache in self.caches.values() if (found := cache.trace()))
                    self._done(self._recorder.trace().model_copy(update={"caches": kept}))
                if self._keeps:
                    self._places.rest()
                    self._clean = True
            finally:
                self._calls = 0
                self._working.clear()
                for cache in self.caches.values():
                    cache.clear()
                if not self._clean:
                    self._clear()

    def share(self, share: Callable[[dict[str, WeightGroup]], bool]) -> HostBytes:
        """Share weights in host memory with other processes by `share`; return how much there is of them."""
        with self._lock:
            return self._places.share(share)

    @property
    def busy(self) -> bool:
        """Whether a component is running."""
        return bool(self._working)

    def at_work(self, name: str) -> bool:
        """Whether the component `name` is running."""
        return name in self._working

    def close(self) -> None:
        """Mark the plan as no longer followed, and evict everything from the device."""
        self.over = True
        self._places.clear()

    def _clear(self) -> None:
        set_handlers(self._attenders)
        self._places.clear()
        self._clean = True

    def _tell(self, held: int, *, during: bool) -> None:
        """Report the bytes of RAM `held`, above the limit, `during` a call or at its end; 0: within the limit."""
        if held:
            self._exceeded(held, during)
            self._recorder.note("this process held more RAM than it may, and no weights were left that could go")

    @contextlib.contextmanager
    def work(self, name: str, role: Role, method: str = "forward") -> Iterator[None]:
        """Run the component `name` in this context; outside a call, it is a call of its own."""
        if in_backward():
            with self.recompute(name):
                yield
            return
        with self.call():
            outermost, manager = not self.at_work(name), self._places.of(name)
            if outermost:
                self._tell(manager.keep_within(name), during=True)
                manager.evict_others(name)  # evictions count for the phase before, loads for this one
                self._recorder.enter(find_phase(name, role, method))
                manager.load(name, method)
            gradients: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if outermost and torch.is_grad_enabled():
                gradients = manager.backward.differentiated(name)
            self._working.append(name)
            try:
                with gradients:
                    yield
                if outermost:
                    manager.finish(name)
            finally:
                if self._working:
                    self._working.pop()
                self._recorder.leave()

    @contextlib.contextmanager
    def recompute(self, name: str) -> Iterator[None]:
        """Run a part of the component `name` again in this context, within a backward pass."""
        with self._lock:
            self._working.append(name)
            try:
                with self._places.of(name).backward.differentiated(name):
                    yield
            finally:
                self._working.remove(name)

    def touch(self, name: str) -> None:
        """Load the weights of `name`, a part of which is about to run without a call of `name`."""
        if self.at_work(name):
            return
        manager = self._places.of(name)
        if self._working:  # the component that uses the part must stay loaded
            manager.load(name)
        else:
            manager.enter(name)
