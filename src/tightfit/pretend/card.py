"""One pretend card: its number, what it is like, its allocator and its clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.pretend.allocator import CachingAllocator
from tightfit.pretend.clock import Host, Timeline
from tightfit.records import Accelerator

__all__ = ["LAUNCH", "Card"]

LAUNCH = 5_000  # nanoseconds that the host needs to launch one kernel from Python


@dataclass(eq=False)
class Card:
    """A card that exists only here. `values` says whether numbers are kept ("real") or mostly shapes ("shapes")."""

    index: int
    accelerator: Accelerator
    host: Host
    values: str
    expandable: bool = False
    stream: int = 0  # the stream that work is given to
    timeline: Timeline = field(init=False)
    allocator: CachingAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.host, LAUNCH)
        self.allocator = CachingAllocator(self.accelerator.bytes, self.timeline.record, expandable=self.expandable)
