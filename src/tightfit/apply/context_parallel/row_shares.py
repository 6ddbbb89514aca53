"""Which rows each rank computes, and which of a kept map it has to get from others."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Span

__all__ = ["RowShares", "Transfer", "missing", "transfers"]


@dataclass(frozen=True)
class RowShares:
    """Contiguous shares of any number of rows, in the order of ranks, in proportion to their `speeds`.

    Each rank has a row at the least, if there are as many. Of equal shares, which differ by a row at the most, rank 0
    has the largest of any number of rows.
    """

    speeds: tuple[float, ...]

    @classmethod
    def equal(cls, count: int) -> RowShares:
        return cls((1.0,) * count)

    def of(self, rank: int, rows: int) -> Span:
        """Return the share of `rank`; it is empty if there are fewer rows than ranks."""
        borders = _borders(self.speeds, rows)
        return Span(borders[rank], borders[rank + 1])


@functools.lru_cache(maxsize=4096)
def _borders(speeds: tuple[float, ...], rows: int) -> tuple[int, ...]:
    """Return where the share of each rank begins, and where the last one ends."""
    exact = [Fraction(speed) for speed in speeds]  # of floats, the ceil of 2.0000001 would be 3
    borders = [math.ceil(rows * sum(exact[:rank]) / sum(exact)) for rank in range(len(speeds) + 1)]
    if rows >= len(speeds):
        for rank in range(1, len(speeds)):
            borders[rank] = min(max(borders[rank], borders[rank - 1] + 1), rows - (len(speeds) - rank))
    return tuple(borders)


class Transfer(NamedTuple):
    """Rows of a kept map that rank `sender` sends to rank `receiver`."""

    sender: int
    receiver: int
    rows: Span


def transfers(rows: int, shares: RowShares, has: Sequence[Span], wants: Sequence[Span]) -> Iterator[Transfer]:
    """Yield what has to be sent so that each rank, which `has` rows of a map, gets all those that it `wants`.

    Each row comes from the rank whose share it belongs to. Every rank finds the same transfers, in the same order.
    """
    for receiver, (there, wanted) in enumerate(zip(has, wants, strict=True)):
        for lacking in missing(there, wanted):
            for sender in range(len(has)):
                own = shares.of(sender, rows)
                found = Span(max(own.lo, lacking.lo), min(own.hi, lacking.hi))
                if found.lo < found.hi:
                    yield Transfer(sender, receiver, found)


def missing(there: Span, wanted: Span) -> list[Span]:
    """Return the rows of `wanted` that are not `there`, in order."""
    if there.lo >= there.hi:
        return [wanted] if wanted.lo < wanted.hi else []
    parts = Span(wanted.lo, min(wanted.hi, there.lo)), Span(max(wanted.lo, there.hi), wanted.hi)
    return [part for part in parts if part.lo < part.hi]
