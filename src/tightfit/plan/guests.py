"""Who of those that come and go is on a device while a call goes on: decided by the order of their work alone."""

from __future__ import annotations

from collections import Counter

from tightfit.footprint import Footprint

__all__ = ["ALTERNATIONS", "CoResidencyTracker", "visits"]

ALTERNATIONS = 4  # changes of turn between two components in one call, after which they stay together


class CoResidencyTracker:
    """Components on one device, as if none of them stayed there for good."""

    def __init__(self) -> None:
        self.aboard: set[str] = set()
        self._turns: Counter[frozenset[str]] = Counter()
        self._last: str | None = None

    def works(self, name: str) -> bool:
        """`name` is at work now, and whoever does not share the device with it goes; whether it had to come."""
        if self._last not in (None, name):
            self._turns[frozenset((name, self._last or ""))] += 1
        self._last = name
        self.aboard = {other for other in self.aboard if other == name or self._share(name, other)}
        came = name not in self.aboard
        self.aboard.add(name)
        return came

    def _share(self, one: str, other: str) -> bool:
        return self._turns[frozenset((one, other))] > ALTERNATIONS


def visits(footprint: Footprint) -> dict[str, tuple[int, ...]]:
    """For each component that works, how many passes it works through each time that it comes, if it does not stay."""
    guests, passes = CoResidencyTracker(), dict[str, list[int]]()
    for done in (phase.calls[index] for phase in footprint.phases for index in phase.call_order):
        own = passes.setdefault(done.component, [])
        own += [0] if guests.works(done.component) else []
        own[-1] += 1
    return {name: tuple(counts) for name, counts in passes.items()}
