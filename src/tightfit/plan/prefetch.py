"""Order in which weights are used, and the ring buffer through which they pass: shared by engine and planner."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["ALIGNMENT", "Lease", "PrefetchOrder", "PrefetchPolicy", "Ring"]


K = TypeVar("K", bound=Hashable)


class PrefetchOrder(Generic[K]):
    """The cycle in which one method uses weights, with the current position and how far the look-ahead has come."""

    def __init__(self, guess: Sequence[K]) -> None:
        self.known = False  # whether the cycle was observed; else it is a guess
        self._set(list(guess))
        self._seen: list[K] = []
        self._used: set[K] = set()
        self._spoiled = False
        self._end: int | None = None  # position at which the look-ahead ends

    def _set(self, cycle: list[K]) -> None:
        self._cycle = cycle
        self._places: dict[K, list[int]] = {}
        for place, key in enumerate(cycle):
            self._places.setdefault(key, []).append(place)
        self._at, self._looked = -1, 0

    def begin(self, *, last: bool = False) -> None:
        """Begin a call; after the `last` one, no use is expected."""
        self._seen, self._used, self._spoiled = [], set(), False
        length = len(self._cycle)
        self._end = ((self._at + 1) // length + 1) * length if last and length else None

    def end(self) -> None:
        """End a call: the uses observed in it are the cycle expected from now on."""
        if self._spoiled or not self._seen:
            return
        if self._seen != self._cycle:
            self._set(list(self._seen))
        elif not self.known:  # during a guess, what had been used in the call was skipped
            self.look_again()
        self.known = True

    def expect(self, keys: Sequence[K]) -> bool:
        """Set `keys` as the next uses, in this order; return whether that was not known.

        If it was not, the end of the last call is no longer known either.
        """
        length, first = len(self._cycle), self._at + 1
        known = self.known and all(self._cycle[(first + i) % length] == key for i, key in enumerate(keys))
        if known or not keys:
            return False
        self._set(list(keys))
        self.known, self._end = True, None
        return True

    def used(self, key: K) -> bool:
        """Record that `key` is used now; return whether it was expected next."""
        self._seen.append(key)
        self._used.add(key)
        if self._cycle and self._cycle[(self._at + 1) % len(self._cycle)] == key:  # nearly always true
            self._at += 1
            self._looked = max(self._looked, self._at + 1)
            return True
        position = self.next_use(key)
        if position is None:
            return False
        self._at = position
        self._looked = max(self._looked, position + 1)
        return False

    @property
    def ahead(self) -> int:
        """Number of future uses that have been looked at."""
        return max(self._looked - self._at - 1, 0)

    def skip(self, count: int, looked: int) -> None:
        """Advance by `count` uses, with `looked` more looked at; nothing is learned from this call."""
        self._at, self._spoiled = self._at + count, True
        self._looked = max(self._looked + looked, self._at + 1)

    def next_use(self, key: K) -> int | None:
        """Return the position of the next use of `key`; None if none is expected."""
        places = self._places.get(key)
        if not places:
            return None
        length = len(self._cycle)
        turn, place = divmod(self._at + 1, length)
        later = bisect.bisect_left(places, place) if len(places) > 1 else int(places[0] < place)
        return turn * length + places[later] if later < len(places) else (turn + 1) * length + places[0]

    def awaited(self, key: K) -> bool:
        """Whether its next use has been looked at, or is the very next: then it should remain loaded for that."""
        position = self.next_use(key)
        if position is None or position < self._looked:
            return position is not None
        return position == self._at + 1 and (self._end is None or position < self._end)

    def passed(self, key: K) -> bool:
        """Whether `key` is not awaited, and the cycle is known or `key` was used in this call."""
        return (self.known or key in self._used) and not self.awaited(key)

    def over(self, key: K) -> bool:
        """Whether `key` was used in the last call and is not expected any more."""
        position = self.next_use(key)
        return self._end is not None and key in self._used and (position is None or position >= self._end)

    @property
    def looked_through(self) -> bool:
        """Whether all of the last call has been looked at."""
        return self._end is not None and self._looked >= self._end

    def look_ahead(self, take: Callable[[K], bool]) -> None:
        """Offer the next uses to `take` until it returns False, or until a whole cycle has been looked at."""
        length = len(self._cycle)
        end = length if self._at < 0 else self._at + max(length, 2)  # what is in use is looked at after its use
        end = end if self._end is None else min(end, self._end)
        while self._looked < end and length:
            key = self._cycle[self._looked % length]
            if (self.known or key not in self._used) and not take(key):
                return
            self._looked += 1

    def look_again(self) -> None:
        """Restart the look-ahead from here: what was looked at before may have been evicted."""
        self._looked = self._at + 1

    def spoil(self) -> None:
        """Note that work is retried: nothing is learned from this call, and the look-ahead restarts from here."""
        self._spoiled = True
        self.look_again()

    def without(self, keys: Container[K]) -> PrefetchOrder[K]:
        """Return the order of a call that goes on from here and uses none of `keys`; what it has used counts."""
        other = PrefetchOrder([key for key in self._cycle if key not in keys])
        other.known = self.known
        other.begin(last=self._end is not None)
        for key in self._seen:
            other.used(key)
        return other

    def rewind(self) -> None:
        """Start the next call at the beginning of the cycle, wherever the last one ended."""
        self._at, self._looked, self._end = -1, 0, None

    def __iter__(self) -> Iterator[K]:
        return iter(self._cycle)


class PrefetchPolicy(ABC, Generic[K]):
    """Which keys of a cycle are loaded and evicted when: the engine does it, the planner's simulation counts its time.

    Those in `resident` are loaded once. All others pass through a ring buffer, in the order of their use and as far
    ahead as it has room.
    """

    def __init__(self, order: PrefetchOrder[K], resident: Container[K]) -> None:
        self._order, self._resident = order, resident
        self._whole: PrefetchOrder[K] | None = None  # the usual order, while a call leaves something out
        self._loaded: dict[K, Any] = {}  # what is loaded or being loaded

    def expect_uses(self, keys: Sequence[K]) -> None:
        """Set the uses to come in this call, in this order."""
        if self._order.expect(keys):
            self._follow_order()

    def leave_out(self, keys: Container[K]) -> list[K]:
        """Expect no more uses of `keys` in this call, from which nothing is learned; return what was loaded in vain."""
        self._whole, self._order = self._whole or self._order, self._order.without(keys)
        return self._follow_order()

    def _whole_again(self) -> None:
        """After a call that left something out, expect a usual one."""
        if self._whole is not None:
            self._order, self._whole = self._whole, None
            self._order.rewind()
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


ALIGNMENT = 4096  # bytes: required by direct reads from disks, and more than any kernel requires


@dataclass(eq=False, slots=True)
class Lease:
    """`size` bytes of the ring buffer from `offset` on. `after` marks the last work on what was there before."""

    offset: int  # bytes
    size: int  # bytes
    after: Any = None
    turn: int = 0  # how many leases were given back when it was, itself included; 0: it was not


class Ring:
    """A ring buffer of `size` bytes, leased in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._leases: deque[Lease] = deque()  # the oldest first
        self._turns = 0  # leases given back so far
        self._latest = Lease(0, 0)  # the last returned of all leases whose bytes were leased again

    def take(self, size: int) -> Lease | None:
        """Lease the next `size` bytes in one piece, rounded up to ALIGNMENT; None while older leases are in the way."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        while (offset := self._free_offset(size)) is None:
            if not self._leases or not self._leases[0].turn:
                return None
            oldest = self._leases.popleft()
            if oldest.turn > self._latest.turn:
                self._latest = oldest
        lease = Lease(offset, size, self._latest.after)
        self._leases.append(lease)
        return lease

    def give_back(self, lease: Lease, mark: Any = None) -> None:
        """Release `lease`: its bytes may be leased again, to be used after `mark`."""
        self._turns += 1
        lease.turn, lease.after = self._turns, mark

    def _free_offset(self, size: int) -> int | None:
        """Return the offset at which `size` bytes fit between the newest lease and the oldest; None if they do not."""
        if not self._leases:
            return 0 if size <= self.size else None
        first, last = self._leases[0].offset, self._leases[-1].offset + self._leases[-1].size
        if last > first:  # free: after the newest, and before the oldest
            if last + size <= self.size:
                return last
            return 0 if size <= first else None
        return last if last + size <= first else None
