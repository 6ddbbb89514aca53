"""Options of one component, and the search for the fastest one within some bytes, most promising first.

A lower bound of each option's time and its least bytes are known at once. Its exact cost is computed only while it may
be the best.
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

ROUNDING = 1e-11  # relative rounding error of sums of the same seconds


class Option(NamedTuple):
    """A plan for one component, with its exact cost."""

    streamed_bytes: int  # bytes loaded onto the device while it runs, in addition to `always`
    seconds: float  # of its work in one pipeline call
    ram: int  # bytes of host memory for offloaded weights
    always: int  # bytes on the device during the whole pipeline call
    plan: ComponentPlan

    @property
    def device_bytes(self) -> int:
        """Bytes on the device while it runs."""
        return self.always + self.streamed_bytes


class LazyOption:
    """An option whose exact cost is computed on demand; `seconds` and `comes` (bytes) are lower bounds."""

    def __init__(
        self,
        seconds: float,
        comes: int,
        settle: Callable[[], ComponentCost],
        least: Callable[[ComponentCost], float],
        time: Callable[[ComponentCost], float],
    ) -> None:
        """`settle` resolves the plan; `least` then gives a better lower bound; `time`, which is slow, simulates it."""
        self.seconds = seconds * (1 - ROUNDING)
        self.streamed_bytes = comes
        self._settle, self._least, self._time = settle, least, time

    @cached_property
    def part(self) -> ComponentCost:
        return self._settle()

    @cached_property
    def settled(self) -> float:
        """Lower bound in seconds, once the plan is resolved."""
        return max(self.seconds, self._least(self.part) * (1 - ROUNDING))

    @cached_property
    def option(self) -> Option:
        part = self.part
        ram = part.component.bytes if part.plan.store.in_ram and not part.is_resident else 0
        return Option(part.streamed_bytes, self._time(part), ram, part.always, part.plan)


class BestOptionSearch:
    """Search for the fastest option, and of equally fast ones the smallest, that loads at most `size` bytes."""

    def __init__(self, offers: Sequence[LazyOption], size: int) -> None:
        """`offers` are sorted by their lower bounds in seconds."""
        self._open = (offer for offer in offers if offer.streamed_bytes <= size)
        self._next = next(self._open, None)
        self._settled: list[tuple[float, int, LazyOption]] = []  # heap by lower bound, then by order of arrival
        self._numbers = itertools.count()
        self._size = size
        self._best: Option | None = None

    @property
    def over(self) -> bool:
        """Whether the best option is known."""
        return self._left == math.inf or (self._best is not None and self._left > self._best.seconds)

    @property
    def seconds(self) -> float:
        """Lower bound of the best option in seconds, as far as known; infinite if nothing fits."""
        return self._left if self._best is None else min(self._best.seconds * (1 - ROUNDING), self._left)

    @property
    def _left(self) -> float:
        """Lower bound in seconds of all options not yet computed; infinite if all are."""
        return min(math.inf if self._next is None else self._next.seconds, self._least_settled)

    @property
    def _least_settled(self) -> float:
        return self._settled[0][0] if self._settled else math.inf

    def go_on(self) -> None:
        """Resolve the plan of one more option, or compute the exact cost of one that is resolved."""
        if self._next is not None and self._next.seconds <= self._least_settled:
            offer, self._next = self._next, next(self._open, None)
            if self._hopeful(offer.seconds, offer.streamed_bytes) and offer.part.streamed_bytes <= self._size:
                heapq.heappush(self._settled, (offer.settled, next(self._numbers), offer))
        elif self._settled:
            seconds, _, offer = heapq.heappop(self._settled)
            hopeful = self._hopeful(seconds, offer.part.streamed_bytes)
            if hopeful and (self._best is None or _rank(offer.option) < _rank(self._best)):
                self._best = offer.option

    def _hopeful(self, seconds: float, comes: int) -> bool:
        """Whether an option with these lower bounds may be the best."""
        best = self._best
        return best is None or seconds < best.seconds * (1 - 2 * ROUNDING) or comes < best.streamed_bytes

    def winner(self) -> Option | None:
        """Run the search to its end and return the best option; None if nothing fits."""
        while not self.over:
            self.go_on()
        return self._best


class OptionSet:
    """All options of one component, searchable by size."""

    def __init__(self, offers: Iterable[LazyOption]) -> None:
        self.offers = sorted(offers, key=lambda offer: (offer.seconds, offer.streamed_bytes))
        self._races: dict[int, BestOptionSearch] = {}

    def search(self, size: int) -> BestOptionSearch:
        """Return the search among options that load at most `size` bytes; the same object for the same size."""
        if size not in self._races:
            self._races[size] = BestOptionSearch(self.offers, size)
        return self._races[size]

    def within(self, size: int) -> Option | None:
        """Return the fastest option, the smallest of equals, that loads at most `size` bytes; None if there is none."""
        return self.search(size).winner()

    def __iter__(self) -> Iterator[Option]:
        """Yield the Pareto-optimal options: each loads more bytes than the one before, and is faster."""
        fastest = math.inf
        for option in sorted((offer.option for offer in self.offers), key=lambda option: option[:3]):
            if option.seconds < fastest:
                fastest = option.seconds
                yield option


def _rank(option: Option) -> tuple[float, int, int]:
    return option.seconds, option.streamed_bytes, option.ram
