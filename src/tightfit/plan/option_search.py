"""What can be done about one component, from the most promising on: what is fastest within some bytes.

Of each it is known at once how long it takes at the least, and how many bytes. What it takes indeed is worked out, one
after another, only while it may be the best.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.component_cost import ComponentCost
from tightfit.schema.plan import ComponentPlan

__all__ = ["BestOptionSearch", "LazyOption", "Option", "OptionSet"]

ROUNDING = 1e-11  # by which sums of the same seconds may differ, of themselves


class Option(NamedTuple):
    """One of them."""

    comes: int  # bytes more on the device while it works
    seconds: float  # of its work in one call
    ram: int  # bytes of host memory for the masters
    always: int  # bytes on the device all along
    plan: ComponentPlan

    @property
    def device_bytes(self) -> int:
        """Bytes on the device while it works."""
        return self.always + self.comes


class LazyOption:
    """An option that is worked out when it is asked for; before, what it takes at the least."""

    def __init__(
        self,
        seconds: float,
        comes: int,
        settle: Callable[[], ComponentCost],
        least: Callable[[ComponentCost], float],
        time: Callable[[ComponentCost], float],
    ) -> None:
        """`settle` decides what is open, `least` is the better bound then, and `time`, which is slow, simulates it."""
        self.seconds = seconds * (1 - ROUNDING)
        self.comes = comes
        self._settle, self._least, self._time = settle, least, time

    @cached_property
    def part(self) -> ComponentCost:
        return self._settle()

    @cached_property
    def settled(self) -> float:
        """Seconds at the least, with all decided."""
        return max(self.seconds, self._least(self.part) * (1 - ROUNDING))

    @cached_property
    def option(self) -> Option:
        part = self.part
        ram = part.component.bytes if part.plan.offload_to == "cpu" and not part.remains else 0
        return Option(part.comes, self._time(part), ram, part.always, part.plan)


class BestOptionSearch:
    """Which offer is the fastest, and of those the least, for which at most `size` bytes come."""

    def __init__(self, offers: Sequence[LazyOption], size: int) -> None:
        """`offers` are sorted by the seconds that they take at the least."""
        self._open = (offer for offer in offers if offer.comes <= size)
        self._next = next(self._open, None)
        self._settled: list[tuple[float, int, LazyOption]] = []  # the most promising first, and of these who came first
        self._numbers = itertools.count()
        self._size = size
        self._best: Option | None = None

    @property
    def over(self) -> bool:
        """Whether it is known who has won."""
        return self._left == math.inf or (self._best is not None and self._left > self._best.seconds)

    @property
    def seconds(self) -> float:
        """What the winner takes at the least, as far as is known; infinite where nothing fits."""
        return self._left if self._best is None else min(self._best.seconds * (1 - ROUNDING), self._left)

    @property
    def _left(self) -> float:
        """What any that is not worked out takes at the least; infinite where all are."""
        return min(math.inf if self._next is None else self._next.seconds, self._least_settled)

    @property
    def _least_settled(self) -> float:
        return self._settled[0][0] if self._settled else math.inf

    def go_on(self) -> None:
        """Settles one offer more, or works out one that is."""
        if self._next is not None and self._next.seconds <= self._least_settled:
            offer, self._next = self._next, next(self._open, None)
            if self._hopeful(offer.seconds, offer.comes) and offer.part.comes <= self._size:
                heapq.heappush(self._settled, (offer.settled, next(self._numbers), offer))
        elif self._settled:
            seconds, _, offer = heapq.heappop(self._settled)
            hopeful = self._hopeful(seconds, offer.part.comes)
            if hopeful and (self._best is None or _rank(offer.option) < _rank(self._best)):
                self._best = offer.option

    def _hopeful(self, seconds: float, comes: int) -> bool:
        """Whether what takes so long at the least, and so many bytes, may win."""
        best = self._best
        return best is None or seconds < best.seconds * (1 - 2 * ROUNDING) or comes < best.comes

    def winner(self) -> Option | None:
        """Works out all that it takes; None if nothing fits."""
        while not self.over:
            self.go_on()
        return self._best


class OptionSet:
    """Options by size."""

    def __init__(self, offers: Iterable[LazyOption]) -> None:
        self.offers = sorted(offers, key=lambda offer: (offer.seconds, offer.comes))
        self._races: dict[int, BestOptionSearch] = {}

    def race(self, size: int) -> BestOptionSearch:
        """Of those for which at most `size` bytes come; who asks again goes on with the same."""
        if size not in self._races:
            self._races[size] = BestOptionSearch(self.offers, size)
        return self._races[size]

    def within(self, size: int) -> Option | None:
        """The fastest, and of those the least, for which at most `size` bytes come; None if there is none."""
        return self.race(size).winner()

    def __iter__(self) -> Iterator[Option]:
        """Each takes more than the one before, and is faster."""
        fastest = math.inf
        for option in sorted((offer.option for offer in self.offers), key=lambda option: option[:3]):
            if option.seconds < fastest:
                fastest = option.seconds
                yield option


def _rank(option: Option) -> tuple[float, int, int]:
    return option.seconds, option.comes, option.ram
