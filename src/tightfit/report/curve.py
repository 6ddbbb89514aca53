"""From a Trace to what a picture needs of it: arrays over time, few enough to draw, and scales for the axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tightfit.records import PhaseTrace, Trace

__all__ = ["Curve", "Scale", "bytes_scale", "seconds_scale"]

Array = NDArray[np.float64]
BINS = 1200  # about a pixel each: what is finer than that cannot be seen


@dataclass(frozen=True, eq=False)
class Curve:
    """Bytes over time; each value holds until the next."""

    seconds: Array
    weights: Array
    activations: Array
    end: float  # where the time axis ends
    peak: int
    peak_at: float
    sampled: bool  # False: there were no samples, the phases' peaks stand in for them

    @classmethod
    def of(cls, trace: Trace) -> Self:
        rows = _rows(trace)
        ends = [phase.start + phase.seconds for phase in trace.phases]
        end = max(trace.seconds, rows[-1, 0], *ends, 0.0) or 1.0
        drawn = _envelope(rows, end)
        total = rows[:, 1] + rows[:, 2]
        highest = int(total.argmax())
        peak, peak_at = int(total[highest]), float(rows[highest, 0])
        if trace.peak_bytes > peak:  # an allocator sees more than samples taken now and then
            peak, peak_at = trace.peak_bytes, _moment(max(trace.phases, key=lambda phase: phase.peak_bytes), rows)
        seconds, weights, activations = np.vstack([drawn, [end, *drawn[-1, 1:]]]).T
        return cls(seconds, weights, activations, end, peak, peak_at, sampled=bool(trace.samples))


def _rows(trace: Trace) -> Array:
    """(seconds, weights, activations), in order of time; at least one row."""
    if trace.samples:
        rows = np.array([(s.seconds, s.weights, s.activations) for s in trace.samples], dtype=np.float64)
        return rows[np.argsort(rows[:, 0], kind="stable")]
    blocks = [(0.0, 0.0, 0.0)]
    for phase in sorted(trace.phases, key=lambda phase: phase.start):
        weights = min(phase.peak_weights, phase.peak_bytes)
        blocks.append((phase.start, weights, phase.peak_bytes - weights))
        blocks.append((phase.start + phase.seconds, 0, 0))
    return np.array(blocks, dtype=np.float64)


def _envelope(rows: Array, end: float) -> Array:
    """Rows for `BINS` equal stretches of time: each at its highest, then its last until the next that has any.

    So no peak is lost or drawn thinner than can be seen, however many samples there are.
    """
    bins = np.minimum((rows[:, 0] / end * BINS).astype(np.int64), BINS - 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    lasts = np.append(starts[1:], len(rows)) - 1
    highest = np.lexsort((rows[:, 1] + rows[:, 2], bins))[lasts]
    drawn = np.stack([rows[highest], rows[lasts]], axis=1)
    drawn[:, :, 0] = (bins[starts, None] + [0, 1]) * (end / BINS)
    seen = np.diff(bins[starts], append=BINS) > 1  # where the next stretch has rows too, the last is not
    kept: Array = drawn[np.stack([np.full_like(seen, fill_value=True), seen & (highest != lasts)], axis=1)]
    return kept


def _moment(phase: PhaseTrace, rows: Array) -> float:
    """When in `phase` the samples are highest; its middle where it has none."""
    inside = rows[(rows[:, 0] >= phase.start) & (rows[:, 0] <= phase.start + phase.seconds)]
    if not len(inside):
        return phase.start + phase.seconds / 2
    return float(inside[(inside[:, 1] + inside[:, 2]).argmax(), 0])


class Scale(NamedTuple):
    """The unit of an axis."""

    size: float
    name: str

    def of(self, value: float) -> float:
        return value / self.size

    def label(self, tick: float) -> str:
        return f"{tick:g} {self.name}" if tick else "0"


def bytes_scale(top: float) -> Scale:
    """The largest unit of which an axis up to `top` bytes has at least one."""
    return _largest(top, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def seconds_scale(end: float) -> Scale:
    """Milliseconds, seconds, minutes or hours, so that an axis up to `end` seconds has short numbers."""
    units = [(3600.0, "h", 2 * 3600.0), (60.0, "min", 180.0), (1.0, "s", 0.5), (1e-3, "ms", 0.0)]
    return next(Scale(size, name) for size, name, least in units if end >= least)


def _largest(top: float, units: list[tuple[float, str]]) -> Scale:
    return Scale(*next((unit for unit in units if top >= unit[0]), units[-1]))
