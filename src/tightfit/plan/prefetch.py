"""Order in which weights are used, and the ring buffer through which they pass: shared by engine and planner."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["ALIGNMENT", "Lease", "PrefetchOrder", "Ring"]


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
        self._own = len(cycle)  # uses of one call: all of the cycle, unless it is of `two_calls`
        self.two_calls = False
        self._places: dict[K, list[int]] = {}
        for place, key in enumerate(cycle):
            self._places.setdefault(key, []).append(place)
        self._at, self._looked = -1, 0

    def begin(self, *, last: bool = False) -> None:
        """Begin a call; after the `last` one, no use is expected."""
        self._seen, self._used, self._spoiled = [], set(), False
        length = self._own
        self._end = ((self._at + 1) // length + 1) * length if last and length else None

    def end(self) -> None:
        """End a call: the uses observed in it are the cycle expected from now on."""
        if self._spoiled or not self._seen or self.two_calls:
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
        end = min(end, length) if self.two_calls else end
        end = end if self._end is None else min(end, self._end)
        while self._looked < end and length:
            key = self._cycle[self._looked % length]
            if self.two_calls and self._looked >= self._own > (self.next_use(key) or 0):
                return  # the second of two calls loads anew what the first has still to use
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

    def for_two_calls(self, left: Container[K], then: Container[K], now: PrefetchOrder[K]) -> PrefetchOrder[K]:
        """Return the order of a call that uses none of the keys `left`, and of one after it that uses none of `then`.

        `now` is the order that the call has followed so far: what it has used counts.
        """
        own, after = ([key for key in self._cycle if key not in keys] for keys in (left, then))
        other = PrefetchOrder(own if now.is_last else [*own, *after])
        other.known, other._own, other.two_calls = self.known, len(own), not now.is_last
        other._end = len(own) if now.is_last else None
        for key in now._seen:
            if key not in left:
                other.used(key)
        return other

    def second_call(self) -> PrefetchOrder[K]:
        """Return the order of the second of two calls, which goes on with what was looked at for it."""
        other = PrefetchOrder(self._cycle[self._own :])
        other.known = self.known
        if self.two_calls and self._at + 1 == self._own:
            other._looked = max(self._looked - self._own, 0)
        return other

    def learn_from(self, other: PrefetchOrder[K]) -> None:
        """Learn the order of uses from a call that followed `other`."""
        self._seen, self._used, self._spoiled = other._seen, other._used, other._spoiled
        self.end()

    def go_on_as(self, other: PrefetchOrder[K]) -> None:
        """Begin a call for which as much has been looked at as in `other`."""
        self.rewind()
        self._looked = min(other._looked, len(self._cycle))

    def finish(self) -> None:
        """Expect no use any more until the next call begins."""
        self.rewind()
        self._end = 0

    @property
    def is_last(self) -> bool:
        """Whether no call is expected after this one."""
        return self._end is not None

    def rewind(self) -> None:
        """Start the next call at the beginning of the cycle, wherever the last one ended."""
        self._at, self._looked, self._end = -1, 0, None

    def __iter__(self) -> Iterator[K]:
        return iter(self._cycle)


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

    @property
    def places(self) -> tuple[tuple[int, int, bool], ...]:
        """Offset and bytes of each lease that is in the way, and whether it was given back; the oldest first."""
        return tuple((lease.offset, lease.size, lease.turn > 0) for lease in self._leases)

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
