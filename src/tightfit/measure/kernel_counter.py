"""Kernels, added up as a footprint tells them."""

from __future__ import annotations

import math

from tightfit.schema.footprint import KernelGroup
from tightfit.simulator.kernel_costs import KernelCost

__all__ = ["KernelCounter"]


class KernelCounter:
    """Kernels, added up by kind, dtype and arithmetic intensity.

    A kernel takes the longer of its arithmetic and its traffic, which a sum of different kernels does not tell; of
    kernels whose operations for each byte differ by no more than the square root of two, it tells it well enough.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int | None], list[int]] = {}

    def add(self, work: KernelCost, times: int = 1) -> None:
        """So many kernels with this work."""
        key = work.kind, str(work.dtype).removeprefix("torch."), _intensity(work)
        sums = self._sums.setdefault(key, [0, 0, 0])
        sums[0] += work.operations * times
        sums[1] += work.bytes * times
        sums[2] += times

    def workloads(self) -> tuple[KernelGroup, ...]:
        return tuple(
            KernelGroup(kind=kind, dtype=dtype, operations=operations, traffic=traffic, kernels=kernels)
            for (kind, dtype, _), (operations, traffic, kernels) in self._sums.items()
        )


def _intensity(work: KernelCost) -> int | None:
    """Operations for each byte, as a power of the square root of two; None where there are none of the one."""
    return round(2 * math.log2(work.operations / work.bytes)) if work.operations and work.bytes else None
