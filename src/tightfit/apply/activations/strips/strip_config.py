"""Configurations of one program, each with less device memory than the one before: for retries when memory runs out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tightfit.apply.activations.strips.graph_cache import kept_strip_plan
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.strip_plan import StripPlan
from tightfit.schema.footprint import FeatureMaps
from tightfit.units import format_bytes

__all__ = ["StripConfig"]

LESS = 0.98  # of the bytes on the device; a retry has to take less than that


@dataclass(frozen=True)
class StripConfig:
    """A limit of `strip_bytes` for strips, and where feature maps are kept; `mark` is the program's cache key."""

    program: Program
    strip_bytes: int
    maps: FeatureMaps
    mark: str = ""
    moves: bool = False  # whether its strip plan records allocations and frees

    @cached_property
    def strip_plan(self) -> StripPlan:
        return kept_strip_plan(self.mark, self.program, self.strip_bytes, self.maps, moves=self.moves)

    def described(self, planned: StripConfig) -> str:
        """How it differs from `planned`, as text."""
        said = [] if self.maps == planned.maps else ["maps in host memory"]
        if self.strip_bytes != planned.strip_bytes:
            said.append(
                f"strips within {format_bytes(self.strip_bytes)} instead of {format_bytes(planned.strip_bytes)}"
            )
        return ", ".join(said)

    def narrower(self, planned: StripConfig, *, separate: bool) -> StripConfig | None:
        """Return the next configuration that takes less device memory; None if there is none.

        The byte limit is halved as long as that helps. Then feature maps go to host memory, if that is `separate`, with
        the limit that was `planned`, halved until the configuration takes less.
        """
        half = max(min(self.strip_bytes, self.strip_plan.peak.device) // 2, 1)
        found = self._below(half, self.maps)
        if found is None and separate and self.maps != "host":
            found = self._below(planned.strip_bytes, "host")
        return found

    def _below(self, working: int, maps: FeatureMaps) -> StripConfig | None:
        """Return one with `working` bytes, halved until it takes less than this one; None if it never does."""
        way, smallest = replace(self, strip_bytes=working, maps=maps), replace(self, strip_bytes=1, maps=maps)
        while not self._takes_more_than(way):
            if not self._takes_more_than(smallest):
                return None
            working = max(working // 2, 1)
            way = replace(way, strip_bytes=working)
        return way

    def _takes_more_than(self, other: StripConfig) -> bool:
        return other.strip_plan.peak.device < LESS * self.strip_plan.peak.device
