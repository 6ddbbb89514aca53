"""Memory for weights that pass through: a ring of bytes, taken in the order of arrival, given back in that of use.

Only numbers here. What is given back out of order waits for what is older; nothing is ever moved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

__all__ = ["ALIGNMENT", "Lease", "Ring"]

ALIGNMENT = 4096  # bytes: what direct reads from disks need, and more than any kernel asks for


@dataclass(eq=False, slots=True)
class Lease:
    """Bytes of the ring from `offset` on. `after` marks the last work on what was there before."""

    offset: int
    size: int
    after: Any = None
    turn: int = 0  # when it was given back; 0: it was not


class Ring:
    """`size` bytes, handed out in turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._leases: deque[Lease] = deque()  # the oldest first
        self._turns = 0  # leases given back so far
        self._latest = Lease(0, 0)  # of those whose bytes were handed out again, the one given back last

    def take(self, size: int) -> Lease | None:
        """The next `size` bytes in one piece; None while older leases are in their way."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        while (offset := self._room(size)) is None:
            if not self._leases or not self._leases[0].turn:
                return None
            oldest = self._leases.popleft()
            if oldest.turn > self._latest.turn:
                self._latest = oldest
        lease = Lease(offset, size, self._latest.after)
        self._leases.append(lease)
        return lease

    def give_back(self, lease: Lease, mark: Any = None) -> None:
        """`lease` may be handed out again, to whoever waits for `mark`."""
        self._turns += 1
        lease.turn, lease.after = self._turns, mark

    def _room(self, size: int) -> int | None:
        """Where `size` bytes fit between the newest lease and the oldest."""
        if not self._leases:
            return 0 if size <= self.size else None
        first, last = self._leases[0].offset, self._leases[-1].offset + self._leases[-1].size
        if last > first:  # free: behind the newest, and before the oldest
            if last + size <= self.size:
                return last
            return 0 if size <= first else None
        return last if last + size <= first else None
