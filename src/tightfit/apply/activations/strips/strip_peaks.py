"""Peak bytes of strips, and what stages keep for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Span

__all__ = ["BoundaryState", "StripPeak"]


class StripPeak(NamedTuple):
    """Peak bytes of feature maps, without inputs, on the device and in host memory.

    Tensors without rows are small beside them.
    """

    device: int
    host: int

    def higher(self, other: StripPeak) -> StripPeak:
        """Return the maximum of the two, for each kind of memory."""
        return StripPeak(max(self.device, other.device), max(self.host, other.host))


class BoundaryState(NamedTuple):
    """What stages keep for each other: bytes, and the strips that maps on the device consist of (None: unknown).

    Besides those bytes: bytes of each node still being copied to host memory, and bytes already being copied back.
    """

    bytes: StripPeak
    strips: Mapping[int, Sequence[Span]] | None
    leaving: Mapping[int, int] = MappingProxyType({})
    coming: Mapping[int, int] = MappingProxyType({})
