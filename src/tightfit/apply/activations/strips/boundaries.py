"""Bytes that stages in strips take, and what one keeps for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Span

__all__ = ["BoundaryState", "StripPeak"]


class StripPeak(NamedTuple):
    """Bytes of maps at most, inputs aside: on the device, and in host memory. What has no rows is small beside them."""

    device: int
    host: int

    def higher(self, other: StripPeak) -> StripPeak:
        """The higher of the two, on the device and in host memory."""
        return StripPeak(max(self.device, other.device), max(self.host, other.host))


class BoundaryState(NamedTuple):
    """What stages keep for each other: bytes, and which strips the maps on the device lie in (None: not known).

    Beside those bytes, how many of each node are still on their way to host memory, or already on their way back.
    """

    bytes: StripPeak
    strips: Mapping[int, Sequence[Span]] | None
    leaving: Mapping[int, int] = MappingProxyType({})
    coming: Mapping[int, int] = MappingProxyType({})
