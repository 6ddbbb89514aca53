"""Components whose passes are differentiated: what their backward passes need on the device, and until when."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from tightfit.apply.weights.differentiable_streamer import DifferentiableStreamer
from tightfit.apply.weights.gradients import current_task, in_backward, within_checkpoint
from tightfit.apply.weights.tensor_loader import TensorLoader
from tightfit.devices.device import Device

__all__ = ["BackwardPasses"]


class BackwardPasses:
    """Loads what a backward pass needs of a component when it needs the first weight of it, and evicts it at its end.

    torch calls back only after a backward pass that succeeded; one that failed ends when torch lets go of the callback.
    """

    def __init__(
        self,
        device: Device,
        streamers: Mapping[str, DifferentiableStreamer],
        loaders: Mapping[str, TensorLoader],
        evict: Callable[[str], object],
    ) -> None:
        self._device, self._streamers, self._loaders, self._evict = device, streamers, loaders, evict
        self._tasks: set[int] = set()  # nested where a custom function calls backward() in its own
        self._names: dict[str, None] = {}

    @contextlib.contextmanager
    def differentiated(self, name: str) -> Iterator[None]:
        """Run `name` with gradients enabled in this context: small tensors that require gradients get them."""
        again = in_backward()
        if again:
            self.need(name)
        links = self._loaders[name].link() if name in self._loaders else None
        try:
            with contextlib.nullcontext() if again or within_checkpoint() else self._device.saved_tensors():
                yield
        finally:
            if links is not None:
                links.undo()

    def need(self, name: str) -> None:
        """Note that weights of `name` are needed now; nothing happens outside of backward passes."""
        task = current_task()
        if task == -1:
            return
        if task not in self._tasks:
            self._tasks.add(task)
            ended = partial(self._ended, task)
            weakref.finalize(ended, self._ended, task).atexit = False
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        if name not in self._names:
            self._names[name] = None
            self._begin(name)

    def finish(self) -> None:
        """End the passes."""
        self._tasks.clear()
        while self._names:
            self._end(self._names.popitem()[0])

    def _ended(self, task: int) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
            if not self._tasks:
                self.finish()

    def _begin(self, name: str) -> None:
        if name not in self._streamers:
            return
        for other, streamer in self._streamers.items():
            if other != name and not streamer.in_use:
                self._evict(other)
        self._streamers[name].begin_backward()
        if name in self._loaders:
            self._loaders[name].load()

    def _end(self, name: str) -> None:
        if name in self._streamers:
            self._streamers[name].end_backward()
            if name in self._loaders and not self._streamers[name].on_device:
                self._loaders[name].evict()
