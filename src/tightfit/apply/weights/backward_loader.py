"""Weights that a backward pass needs: loaded again into memory of their own, which nothing overwrites."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.copy_stream import CopyStream
from tightfit.measure.recorder import Recorder
from tightfit.plan.backward_cache import BackwardCache

__all__ = ["BackwardLoader"]


class BackwardLoader(BackwardCache[WeightGroup]):
    """Loads weight groups into at most `limit` bytes, or those in use.

    autograd keeps a tensor for as long as a kernel may need it, and says no word when that ends. So the memory of a
    group that is evicted is freed by the last tensor that refers to it, never leased to another as in the ring buffer.
    """

    _loaded: dict[WeightGroup, LoadedGroup]

    def __init__(
        self, limit: int, stream: CopyStream, recorder: Recorder, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        super().__init__(limit)
        self._stream, self._recorder, self._allocate = stream, recorder, allocate

    def end(self) -> None:
        """End a backward pass: the next is expected to use the same groups in the same order."""
        self._order.end()
        self.clear()

    def clear(self) -> None:
        """Evict everything, whatever state an interruption left."""
        for here in list(self._loaded.values()):
            here.handle.cancel()
        self._loaded.clear()
        self._recorder.hold(self, 0)

    def __getitem__(self, group: WeightGroup) -> LoadedGroup:
        """Return `group`, loaded; what is needed next is sent after it, as far as memory allows."""
        self.use(group)
        here = self._loaded[group]
        self._recorder.waited(here.handle.wait_on_device())
        self.send_ahead()
        return here

    def _send_if_room(self, key: WeightGroup) -> bool:
        try:
            return super()._send_if_room(key)
        except torch.OutOfMemoryError:  # what is loaded is needed sooner
            return False

    def _send_now(self, key: WeightGroup) -> None:
        self._recorder.loaded_on_demand(learning=not self._order.known)
        try:
            super()._send_now(key)
        except torch.OutOfMemoryError:
            for other in list(self._idle()):
                self._evict(other)
            super()._send_now(key)

    def _idle(self) -> Iterator[WeightGroup]:
        return (group for group, here in self._loaded.items() if not here.users)

    def _size(self, key: WeightGroup) -> int:
        return key.size

    def _evict(self, key: WeightGroup) -> None:
        self._loaded.pop(key).handle.cancel()

    def _send(self, key: WeightGroup) -> None:
        here = LoadedGroup(key, self._allocate(key.size))
        with self._recorder.uncounted():
            here.handle = key.store.send(self._stream, here.region, self._stream.mark())
        self._recorder.moved(bytes_in=key.size)
        self._loaded[key] = here
        self._recorder.hold(self, self._bytes())
