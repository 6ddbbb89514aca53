"""Weights that a backward pass needs: loaded again into memory of their own, which nothing overwrites."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.copy_stream import CopyStream
from tightfit.measure.recorder import Recorder
from tightfit.plan.prefetch import PrefetchOrder

__all__ = ["BackwardLoader"]


class BackwardLoader:
    """Loads weight groups in the order of the last backward pass, into at most `limit` bytes, or those in use.

    autograd keeps a tensor for as long as a kernel may need it, and says no word when that ends. So the memory of a
    group that is evicted is freed by the last tensor that refers to it, never leased to another as in the ring buffer.
    """

    def __init__(
        self, limit: int, stream: CopyStream, recorder: Recorder, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        self._limit, self._stream, self._recorder, self._allocate = limit, stream, recorder, allocate
        self._order: PrefetchOrder[WeightGroup] = PrefetchOrder(())
        self._loaded: dict[WeightGroup, LoadedGroup] = {}
        self._latest: WeightGroup | None = None

    def begin(self) -> None:
        """Begin a backward pass."""
        self._order.rewind()
        self._order.begin()
        self._latest = None

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
        if group is not self._latest:  # a layer's weights are asked for one after another
            self._latest = group
            self._order.used(group)
        if group not in self._loaded:
            self._recorder.loaded_on_demand(learning=not self._order.known)
            self._evict_for(group)
            self._send(group)
        here = self._loaded[group]
        self._recorder.waited(here.handle.wait_on_device())
        self._order.look_ahead(self._send_if_room)
        return here

    def _send_if_room(self, group: WeightGroup) -> bool:
        if group not in self._loaded:
            if not self._evict_for(group):
                return False
            self._send(group)
        return True

    def _evict_for(self, group: WeightGroup) -> bool:
        """Evict groups that are needed later than `group`, the last needed first; return whether it has room then."""
        when = self._order.next_use
        needed = 0 if group is self._latest else when(group)
        while self._bytes() + group.size > self._limit:
            idle = [other for other, here in self._loaded.items() if not here.users and other is not self._latest]
            later = {other: when(other) for other in idle}
            last = max(later, key=lambda other: _or_never(later[other]), default=None)
            if last is None or _or_never(later[last]) <= _or_never(needed):
                return False
            self._evict(last)
        return True

    def _evict(self, group: WeightGroup) -> None:
        self._loaded.pop(group).handle.cancel()

    def _bytes(self) -> int:
        return sum(group.size for group in self._loaded)

    def _send(self, group: WeightGroup) -> None:
        try:
            region = self._allocate(group.size)
        except torch.OutOfMemoryError:
            for other in [other for other, here in self._loaded.items() if not here.users]:
                self._evict(other)
            region = self._allocate(group.size)
        here = LoadedGroup(group, region)
        with self._recorder.uncounted():
            here.handle = group.store.send(self._stream, region, self._stream.mark())
        self._recorder.moved(bytes_in=group.size)
        self._loaded[group] = here
        self._recorder.hold(self, self._bytes())


def _or_never(position: int | None) -> float:
    return float("inf") if position is None else position
