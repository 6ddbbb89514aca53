"""Options of one component, and the search for the fastest one within some bytes, most promising first.

A lower bound of each option's time and its least bytes are known at once. Its exact cost is computed only while it may
be the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.component_cost import ComponentCost
from tightfit.schema.plan import ComponentPlan

__all__ = ["BestOptionSearch", "LazyOption", "Option", "OptionSet", "fastest_combination"]

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
    """An option whose exact cost is computed on demand; `seconds` and `streamed_bytes` are lower bounds."""

    def __init__(
        self,
        seconds: float,
        streamed_bytes: int,
        resolve: Callable[[], ComponentCost],
        simulate: Callable[[ComponentCost], float],
    ) -> None:
        """`resolve` resolves the plan; then `simulate`, which is slow, gives its seconds."""
        self.seconds = seconds * (1 - ROUNDING)
        self.streamed_bytes = streamed_bytes
        self._resolve, self._simulate = resolve, simulate

    @cached_property
    def cost(self) -> ComponentCost:
        return self._resolve()

    @cached_property
    def option(self) -> Option:
        cost = self.cost
        return Option(cost.streamed_bytes, self._simulate(cost), cost.ram_bytes, cost.always, cost.plan)


class BestOptionSearch:
    """Search for the fastest option, and of equally fast ones the smallest, that loads at most `size` bytes."""

    def __init__(self, lazy_options: Sequence[LazyOption], size: int) -> None:
        """`lazy_options` are sorted by their lower bounds in seconds."""
        self._open = (option for option in lazy_options if option.streamed_bytes <= size)
        self._next = next(self._open, None)
        self._size = size
        self._best: Option | None = None

    @property
    def done(self) -> bool:
        """Whether the best option is known."""
        left = self._remaining_bound
        return left == math.inf or (self._best is not None and left > self._best.seconds)

    @property
    def seconds(self) -> float:
        """Lower bound of the best option in seconds, as far as known; infinite if nothing fits."""
        left = self._remaining_bound
        return left if self._best is None else min(self._best.seconds * (1 - ROUNDING), left)

    @property
    def _remaining_bound(self) -> float:
        """Lower bound in seconds of all options not yet computed; infinite if all are."""
        return math.inf if self._next is None else self._next.seconds

    def step(self) -> None:
        """Compute the exact cost of one more option, unless it cannot be the best."""
        option = self._next
        if option is None:
            return
        self._next = next(self._open, None)
        if not self._may_be_best(option.seconds, option.streamed_bytes) or option.cost.streamed_bytes > self._size:
            return
        if self._may_be_best(option.seconds, option.cost.streamed_bytes):
            self._best = min(filter(None, (self._best, option.option)), key=_rank)

    def _may_be_best(self, seconds: float, streamed_bytes: int) -> bool:
        """Whether an option with these lower bounds may be the best."""
        best = self._best
        return best is None or seconds < best.seconds * (1 - 2 * ROUNDING) or streamed_bytes < best.streamed_bytes

    def run_to_end(self) -> Option | None:
        """Run the search to its end and return the best option; None if nothing fits."""
        while not self.done:
            self.step()
        return self._best


class OptionSet:
    """All options of one component, searchable by size."""

    def __init__(self, lazy_options: Iterable[LazyOption]) -> None:
        self.lazy_options = sorted(lazy_options, key=lambda option: (option.seconds, option.streamed_bytes))
        self._searches: dict[int, BestOptionSearch] = {}

    def search(self, size: int) -> BestOptionSearch:
        """Return the search among options that load at most `size` bytes; the same object for the same size."""
        if size not in self._searches:
            self._searches[size] = BestOptionSearch(self.lazy_options, size)
        return self._searches[size]

    def within(self, size: int) -> Option | None:
        """Return the fastest option, the smallest of equals, that loads at most `size` bytes; None if there is none."""
        return self.search(size).run_to_end()

    def __iter__(self) -> Iterator[Option]:
        """Yield the Pareto-optimal options: each loads more bytes than the one before, and is faster."""
        fastest = math.inf
        for option in sorted((lazy.option for lazy in self.lazy_options), key=lambda option: option[:3]):
            if option.seconds < fastest:
                fastest = option.seconds
                yield option


def _rank(option: Option) -> tuple[float, int, int]:
    return option.seconds, option.streamed_bytes, option.ram


def fastest_combination(option_sets: Sequence[OptionSet], most: int) -> tuple[Option, ...] | None:
    """Return the fastest choice of one option from each set, at most `most` bytes together; None if nothing fits."""
    if not option_sets:
        return () if most >= 0 else None
    if len(option_sets) == 1:
        option = option_sets[0].within(most)
        return None if option is None else (option,)
    together = ((first, fastest_combination(option_sets[1:], most - first.streamed_bytes)) for first in option_sets[0])
    fitting = [(first, *others) for first, others in together if others is not None]
    return min(fitting, key=lambda options: sum(option.seconds for option in options), default=None)
