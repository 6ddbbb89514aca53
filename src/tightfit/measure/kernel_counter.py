"""Sums of kernel costs, as a footprint records them."""

from __future__ import annotations

import math

from tightfit.schema.footprint import KernelGroup
from tightfit.simulator.kernel_costs import KernelCost

__all__ = ["KernelCounter"]


class KernelCounter:
    """Sums kernels by kind, dtype and arithmetic intensity.

    A kernel takes the longer of its arithmetic and its traffic, which cannot be computed from a sum over different
    kernels; for kernels whose operations per byte differ by at most the square root of two, it is accurate enough.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int | None], list[int]] = {}

    def add(self, work: KernelCost, times: int = 1) -> None:
        """Add `times` kernels of this cost."""
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
    """Operations per byte, as a power of the square root of two; None where either is zero."""
    return round(2 * math.log2(work.operations / work.bytes)) if work.operations and work.bytes else None
