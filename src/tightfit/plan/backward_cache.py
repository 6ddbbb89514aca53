"""Which weights are on the device in a backward pass: shared by engine and planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tightfit.plan.compute_segments import ComputeSegment
from tightfit.plan.prefetch import PrefetchOrder
from tightfit.plan.timeline import HostOverheads

__all__ = ["BackwardCache", "backward_seconds"]


K = TypeVar("K", bound=Hashable)


class BackwardCache(ABC, Generic[K]):
    """Loads keys in the order of the last backward pass, into at most `limit` bytes, or those in use.

    What is needed next is sent ahead; what is needed last is evicted first.
    """

    def __init__(self, limit: int, guess: Sequence[K] = ()) -> None:
        self._limit = limit
        self._order = PrefetchOrder(guess)
        self._loaded: dict[K, Any] = {}
        self._latest: K | None = None

    def begin(self) -> None:
        """Begin a backward pass."""
        self._order.rewind()
        self._order.begin()
        self._latest = None

    def use(self, key: K) -> None:
        """Record a use of `key`, and load it if it is not loaded."""
        if key != self._latest:  # a layer's weights are asked for one after another
            self._latest = key
            self._order.used(key)
        if key not in self._loaded:
            self._evict_for(key)
            self._send_now(key)

    def send_ahead(self) -> None:
        """Send what is needed next, as far as there is room."""
        self._order.look_ahead(self._send_if_room)

    def _send_if_room(self, key: K) -> bool:
        if key not in self._loaded:
            if not self._evict_for(key):
                return False
            self._send(key)
        return True

    def _evict_for(self, key: K) -> bool:
        """Evict what is needed later than `key`, the last needed first; return whether it has room then."""
        when = self._order.next_use
        needed = 0 if key == self._latest else when(key)
        while self._bytes() + self._size(key) > self._limit:
            later = {other: when(other) for other in self._idle() if other != self._latest}
            last = max(later, key=lambda other: _or_never(later[other]), default=None)
            if last is None or _or_never(later[last]) <= _or_never(needed):
                return False
            self._evict(last)
        return True

    def _bytes(self) -> int:
        return sum(self._size(key) for key in self._loaded)

    def _send_now(self, key: K) -> None:
        """Load `key`, which was not sent ahead."""
        self._send(key)

    def _idle(self) -> Iterable[K]:
        """What is loaded and not in use."""
        return self._loaded

    @abstractmethod
    def _size(self, key: K) -> int:
        """Return the bytes of `key`."""

    @abstractmethod
    def _send(self, key: K) -> None:
        """Load `key`."""

    @abstractmethod
    def _evict(self, key: K) -> None:
        """Free the memory of `key`."""


def _or_never(position: int | None) -> float:
    return float("inf") if position is None else position


class _Simulation(BackwardCache[str]):
    """A BackwardCache of weight groups of `sizes` bytes, over time in seconds."""

    def __init__(self, order: Sequence[str], sizes: Mapping[str, int], limit: int, rate: float, launch: float) -> None:
        super().__init__(limit, order)
        self._order.known = True
        self._sizes, self._rate, self._launch = sizes, rate, launch
        self.now = self.host = self._link = 0.0

    def run(self, segment: ComputeSegment, overheads: HostOverheads) -> None:
        if segment.group:
            self.host += overheads.streamed if segment.group not in self._loaded else overheads.resident
            self.use(segment.group)
            self.now = max(self.now, self._loaded[segment.group])
            self.send_ahead()
        self.host += segment.launching
        self.now = max(self.now + segment.seconds, self.host)
        if segment.copying:
            self.now = self.host = self._link = max(self._link, self.now) + segment.copying

    def _size(self, key: str) -> int:
        return self._sizes[key]

    def _send(self, key: str) -> None:
        self.host += self._launch
        self._link = max(self._link, self.now, self.host) + self._sizes[key] / self._rate  # after all work so far
        self._loaded[key] = self._link

    def _evict(self, key: str) -> None:
        del self._loaded[key]


def backward_seconds(
    segments: Sequence[ComputeSegment],
    sizes: Mapping[str, int],
    limit: int,
    rate: float,
    launch: float,
    overheads: HostOverheads,
) -> float:
    """Return the seconds of a backward pass whose weights, groups of `sizes` bytes, are loaded at `rate` bytes/s.

    `limit` are the bytes for weights; the host takes `launch` seconds for each copy, and `overheads` for each use.
    """
    order: list[str] = []
    for segment in segments:
        if segment.group and (not order or order[-1] != segment.group):
            order.append(segment.group)
    simulation = _Simulation(order, sizes, limit, rate, launch)
    simulation.begin()
    for segment in segments:
        simulation.run(segment, overheads)
    return simulation.now
