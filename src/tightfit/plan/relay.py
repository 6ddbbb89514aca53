"""What passes take at the least while weights come through a ring: nothing begins to come before there is room for it.

That leaves out that what is in a ring may lie in the way, and that a host launches the work. flow.py plays all of it,
which takes much longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tightfit.plan.stretches import ComputeSegment

__all__ = ["two_in_a_row"]


class _Use(NamedTuple):
    """Of what comes; and all that is done from then until the next."""

    parcel: str
    size: int  # bytes
    needed: float  # seconds for which it is at work
    later: float  # seconds


def two_in_a_row(
    stretches: Sequence[ComputeSegment], passing: Mapping[str, int], ring: int, rate: float
) -> tuple[float, float]:
    """Seconds until a pass is done, and two of them, at the least.

    `passing` weights, of so many bytes each, come through a ring of `ring` bytes at `rate` bytes a second, in the order
    of their use. What fits into the ring is there at the beginning, and what is to be used again before others need its
    place stays in it.
    """
    lead, uses = _uses(stretches, passing)
    following = [*uses, *uses]
    following.reverse()
    arrivals: deque[float] = deque()  # of what is in the ring, use by use
    arrived, awaited = dict.fromkeys(passing, 0.0), dict.fromkeys(passing, 0)
    now = link = -math.inf  # all that comes before the beginning is there in time
    free = ring

    def send() -> None:
        nonlocal link, free
        while following and (awaited[following[-1].parcel] or following[-1].size <= free):
            parcel, size, _, _ = following.pop()
            if not awaited[parcel]:
                free -= size
                link = (now if now > link else link) + size / rate
                arrived[parcel] = link
            awaited[parcel] += 1
            arrivals.append(arrived[parcel])

    send()
    now, ends = 0.0, list[float]()
    for _ in range(2):
        now += lead
        for parcel, size, needed, later in uses:
            arrival = arrivals.popleft()
            now = (now if now > arrival else arrival) + needed
            awaited[parcel] -= 1
            if not awaited[parcel]:
                free += size
                send()
            now += later
        ends.append(now)
    return ends[0], ends[1]


def _uses(stretches: Sequence[ComputeSegment], passing: Mapping[str, int]) -> tuple[float, list[_Use]]:
    """Seconds until something is needed that comes, and all that does."""
    lead, uses = 0.0, list[_Use]()
    for stretch in stretches:
        if stretch.parcel in passing:
            uses.append(_Use(stretch.parcel, passing[stretch.parcel], stretch.seconds, 0.0))
        elif uses:
            uses[-1] = uses[-1]._replace(later=uses[-1].later + stretch.seconds)
        else:
            lead += stretch.seconds
    return lead, uses
