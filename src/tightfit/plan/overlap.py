"""Seconds that a split network saves because its parts work at the same time, on different chunks of a batch.

This is pipeline parallelism, with chunks as micro-batches.

While a later part computes a chunk, the part before it is at work on the next chunk. All chunks take as long as one
takes through all parts, and then one more of the slowest part for each further chunk; but no less than the host needs
to launch them all.

Where a pipeline calls its denoiser twice in a step, and `cfg` is "batched", the two calls become one of two chunks. The
first step is made call by call, and once more as one call, to see that the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tightfit.plan.compute_segments import segment_of
from tightfit.plan.network_parts import overlaps_parts
from tightfit.plan.options import variant_of
from tightfit.plan.split_footprint import part_names
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan

__all__ = ["OverlappedParts", "overlapped_parts", "paired_runs"]


class OverlappedParts(NamedTuple):
    """Parts of one network that work at the same time."""

    names: tuple[str, ...]  # under which they are planned
    chunks: int  # of a batch, in each of its calls
    launching: float  # seconds of the host for all of its calls
    in_turn: float = 0.0  # share of the work that is done once more, one part after another

    def seconds_saved(self, seconds: Mapping[str, float]) -> float:
        """Return what is saved of the `seconds` of each part by itself, by name, in one phase; below 0: it is lost."""
        parts = [seconds.get(name, 0.0) for name in self.names]
        if not all(parts):
            return 0.0
        together = (sum(parts) + (self.chunks - 1) * max(parts)) / self.chunks
        return sum(parts) * (1 - self.in_turn) - min(max(together, self.launching), sum(parts))


def overlapped_parts(footprint: Footprint, plan: Plan, devices: Mapping[str, Accelerator]) -> list[OverlappedParts]:
    """Return the parts of each network that `plan` splits over `devices` such that they work at the same time."""
    found = []
    varied = footprint.with_variant(variant_of(footprint, plan))
    for name, chosen in plan.components.items():
        if not overlaps_parts(chosen):
            continue
        names, launching = tuple(part_names(name, chosen)), sum(_launching(varied, name, devices[plan.device_of(name)]))
        chunks, runs = _chunks(footprint, varied, name), paired_runs(footprint, name)
        if chosen.cfg == "batched":
            found += [OverlappedParts(names, 2, launching, 2 / runs)] if runs else []
        elif chunks > 1:
            found.append(OverlappedParts(names, chunks, launching))
    return found


def paired_runs(footprint: Footprint, name: str) -> int:
    """Return how often the component is called, if all of that is two calls in each step; else 0."""
    calls = [call for phase in footprint.phases for call in phase.calls if call.component == name]
    return sum(call.runs for call in calls) if calls and all(call.paired for call in calls) else 0


def _chunks(usual: Footprint, varied: Footprint, name: str) -> int:
    """Return in how many chunks a call of the component is computed: how often it runs all of its blocks."""
    once, times = _most_blocks(usual, name), _most_blocks(varied, name)
    return max(round(times / once), 1) if once else 1


def _most_blocks(footprint: Footprint, name: str) -> int:
    """Return how many times a call of the component runs a block."""
    calls = (call for phase in footprint.phases for call in phase.calls if call.component == name)
    return max((sum(bool(use.block) for use in call.block_uses) for call in calls), default=0)


def _launching(footprint: Footprint, name: str, device: Accelerator) -> Iterator[float]:
    """Yield the seconds in which the host launches each kind of the component's calls."""
    for phase in footprint.phases:
        for call in phase.calls:
            if call.component == name:
                yield call.runs * sum(segment_of(use.work, device).launching for use in call.block_uses)
