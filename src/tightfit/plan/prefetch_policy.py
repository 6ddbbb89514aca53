"""What is loaded and evicted when, by the order of uses: the engine does it, and the planner counts its time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tightfit.plan.prefetch import PrefetchOrder

__all__ = ["PrefetchPolicy"]

K = TypeVar("K", bound=Hashable)


class PrefetchPolicy(ABC, Generic[K]):
    """Which keys of a cycle are loaded and evicted when: the engine does it, the planner's simulation counts its time.

    Those in `resident` are loaded once. All others pass through a ring buffer, in the order of their use and as far
    ahead as it has room.
    """

    def __init__(self, order: PrefetchOrder[K], resident: Container[K]) -> None:
        self._order, self._resident = order, resident
        self._usual: PrefetchOrder[K] | None = None  # the usual order, while this call or the next leaves something out
        self._leaves_out = self._then = False  # whether this one does, and whether the next one does
        self._loaded: dict[K, Any] = {}  # what is loaded or being loaded

    def expect_uses(self, keys: Sequence[K]) -> None:
        """Set the uses to come in this call, in this order."""
        if self._order.expect(keys):
            self._follow_order()

    def leave_out(self, keys: Container[K] | None, then: Container[K] | None = None) -> list[K]:
        """Expect no more uses of `keys` in this call, and none of `then` in the next one; None: a usual call.

        Nothing is learned from a call that is not usual. Return what was loaded in vain.
        """
        usual = self._usual or self._order
        self._order = usual.for_two_calls(keys or (), then or (), self._order)
        self._usual, self._leaves_out, self._then = usual, keys is not None, then is not None
        return self._follow_order()

    def _end_call(self) -> None:
        """End a call, and load what the next one needs first."""
        order, usual = self._order, self._usual
        order.end()
        if usual is None:
            self._send_ahead()
            return
        if not self._leaves_out:
            usual.learn_from(order)
        if order.is_last:
            usual.finish()
        elif self._then:
            self._order, self._leaves_out, self._then = order.second_call(), True, False
            self._follow_order()
            return
        else:
            usual.go_on_as(order.second_call())
        self._order, self._usual = usual, None
        self._follow_order()

    def _follow_order(self) -> list[K]:
        """Load by an order that has changed; return what was loaded, or on its way, and is not needed soon."""
        self._send_ahead()  # counts what is loaded and needed soon; the rest is dropped
        dropped = self._drop(lambda other: not self._order.awaited(other))
        self._send_ahead()
        return dropped

    def _use(self, key: K) -> None:
        """Record a use of `key`, and load it if it is not loaded."""
        if not self._order.used(key):
            self._drop(lambda other: self._order.passed(other) and other != key)
        if key not in self._loaded:
            self._send_now(key)

    def _send_now(self, key: K) -> None:
        """Load `key`, whose use was not predicted; others in the ring that are not in use may be dropped for it."""
        if self._send_if_room(key):
            return
        self._drop(lambda other: other != key)
        if not self._send_if_room(key):  # more in use at once than the ring was made for
            self._send_beside(key)

    def _used_up(self, key: K) -> None:
        """End a use of `key`: unless it remains loaded, its room is for what is needed next."""
        if key not in self._resident and not self._order.awaited(key):
            self._release(key)
            self._send_ahead()

    def _send_ahead(self) -> None:
        self._order.look_ahead(self._send_if_room)

    def _drop(self, which: Callable[[K], bool]) -> list[K]:
        """Evict what is in the ring, not in use and for which `which` is true; return it."""
        idle = [key for key in self._idle_in_ring() if which(key)]
        for key in idle:
            self._evict(key)
        if idle:
            self._order.look_again()
        return idle

    @abstractmethod
    def _send_if_room(self, key: K) -> bool:
        """Load `key` if there is room, unless it is loaded; return whether it is."""

    @abstractmethod
    def _send_beside(self, key: K) -> None:
        """Load `key` into memory beside the ring."""

    @abstractmethod
    def _idle_in_ring(self) -> Iterable[K]:
        """What is in the ring and not in use."""

    @abstractmethod
    def _release(self, key: K) -> None:
        """Free the memory of `key`, which is loaded."""

    def _evict(self, key: K) -> None:
        """Free the memory of `key`, which may still be on its way."""
        self._release(key)
