"""Curves, axis scales and phase labels of a timeline figure, from a Trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from numpy.typing import NDArray

from tightfit.schema.results import PhaseTrace, Trace

__all__ = ["Curve", "Label", "Scale", "bytes_scale", "draw_labels", "seconds_scale", "shorten", "spread"]


Array = NDArray[np.float64]
BINS = 1200  # of the time axis, about one pixel each


@dataclass(frozen=True, eq=False)
class Curve:
    """Bytes over time; each value holds until the next."""

    seconds: Array
    weights: Array  # bytes
    activations: Array  # bytes
    end: float  # of the time axis, in seconds
    peak: int  # bytes
    peak_at: float  # seconds
    sampled: bool  # False: there were no samples, and the phases' peaks are used instead

    @classmethod
    def of(cls, trace: Trace) -> Self:
        rows = _rows(trace)
        ends = [phase.start + phase.seconds for phase in trace.phases]
        end = max(trace.seconds, rows[-1, 0], *ends, 0.0) or 1.0
        drawn = _envelope(rows, end)
        total = rows[:, 1] + rows[:, 2]
        highest = int(total.argmax())
        peak, peak_at = int(total[highest]), float(rows[highest, 0])
        if trace.peak_bytes > peak:  # an allocator also sees peaks between samples
            peak, peak_at = trace.peak_bytes, _moment(max(trace.phases, key=lambda phase: phase.peak_bytes), rows)
        seconds, weights, activations = np.vstack([drawn, [end, *drawn[-1, 1:]]]).T
        return cls(seconds, weights, activations, end, peak, peak_at, sampled=bool(trace.samples))


def _rows(trace: Trace) -> Array:
    """Rows of (seconds, weights, activations), sorted by time; at least one."""
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
    """Rows for `BINS` equal bins of time: the highest of each, then its last, which holds until the next bin with rows.

    So no peak is lost or drawn too thin to be visible, however many samples there are.
    """
    bins = np.minimum((rows[:, 0] / end * BINS).astype(np.int64), BINS - 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    lasts = np.append(starts[1:], len(rows)) - 1
    highest = np.lexsort((rows[:, 1] + rows[:, 2], bins))[lasts]
    drawn = np.stack([rows[highest], rows[lasts]], axis=1)
    drawn[:, :, 0] = (bins[starts, None] + [0, 1]) * (end / BINS)
    seen = np.diff(bins[starts], append=BINS) > 1  # if the next bin has rows too, the last row is not visible
    kept: Array = drawn[np.stack([np.full_like(seen, fill_value=True), seen & (highest != lasts)], axis=1)]
    return kept


def _moment(phase: PhaseTrace, rows: Array) -> float:
    """Time in seconds of the highest sample in `phase`; its middle if it has none."""
    inside = rows[(rows[:, 0] >= phase.start) & (rows[:, 0] <= phase.start + phase.seconds)]
    if not len(inside):
        return phase.start + phase.seconds / 2
    return float(inside[(inside[:, 1] + inside[:, 2]).argmax(), 0])


class Scale(NamedTuple):
    """The unit of an axis."""

    size: float  # in bytes or seconds
    name: str

    def of(self, value: float) -> float:
        return value / self.size

    def label(self, tick: float) -> str:
        return f"{tick:g} {self.name}" if tick else "0"


def bytes_scale(top: float) -> Scale:
    """Return the largest unit that is at most `top` bytes, the end of the axis."""
    return _largest(top, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def seconds_scale(end: float) -> Scale:
    """Return milliseconds, seconds, minutes or hours, so that an axis up to `end` seconds has short numbers."""
    blocks = [(3600.0, "h", 2 * 3600.0), (60.0, "min", 180.0), (1.0, "s", 0.5), (1e-3, "ms", 0.0)]
    return next(Scale(size, name) for size, name, least in blocks if end >= least)


def _largest(top: float, blocks: list[tuple[float, str]]) -> Scale:
    return Scale(*next((unit for unit in blocks if top >= unit[0]), blocks[-1]))


GAP = 0.018  # between two names, as a fraction of the axes' width
OUTSIDE = 0.08, 0.02  # how far names may extend beyond the axes on the left and right, as fractions of their width
LEADER = 0.045  # length of a leader line, and of the space kept for one, as a fraction of the axes' height


@dataclass(frozen=True)
class Label:
    """A phase's name and a detail under it; `start` and `stop` are its ends on the time axis, in the axis' unit."""

    name: str
    detail: str
    start: float
    stop: float
    colour: str
    weight: float  # if not all labels fit, those with the largest weights are drawn


def draw_labels(axes: Axes, labels: Sequence[Label], height: float, grey: str) -> None:
    """Draw `labels` above `height`, a fraction of the axes' height: as many as fit."""
    longest = max(10, min(28, 110 // max(len(labels), 1)))
    texts = [_write(axes, label, height + LEADER, grey, longest) for label in labels]
    widths = [_width(axes, pair) + GAP for pair in texts]
    low, high = -OUTSIDE[0], 1 + OUTSIDE[1]
    kept = _heaviest(labels, widths, high - low)
    for index in set(range(len(labels))) - set(kept):
        for text in texts[index]:
            text.remove()
    _, end = axes.get_xlim()
    wanted = [(labels[index].start + labels[index].stop) / 2 / end for index in kept]
    middles = spread(wanted, [widths[index] for index in kept], low, high)
    for index, want, middle in zip(kept, wanted, middles, strict=True):
        for text in texts[index]:
            text.set_x(middle)
        half = (widths[index] - GAP) / 2
        if labels[index].start / end > middle - half or labels[index].stop / end < middle + half:
            near = min(max(want, middle - half), middle + half)
            ends = ([near, want], [height + LEADER - 0.008, height + 0.004])
            axes.add_line(Line2D(*ends, transform=axes.transAxes, clip_on=False, color=grey, linewidth=0.6))


def shorten(text: str, most: int) -> str:
    """Shorten `text` to one line of at most `most` characters.

    >>> shorten("a name far too long", 10)
    'a name fa…'
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def spread(wanted: Sequence[float], widths: Sequence[float], low: float, high: float) -> list[float]:
    """Return middles of items `widths` wide: in order, apart, inside low…high, and as near to `wanted` as possible.

    Less the widths before each, middles must not decrease. The nearest such values are found by pooling adjacent
    violators (isotonic regression): neighbours that decrease get their mean.

    >>> [round(middle, 3) for middle in spread([0.0, 0.0, 0.9], [0.2, 0.2, 0.2], 0.0, 1.0)]
    [0.1, 0.3, 0.9]
    """
    before = [sum(widths[:index]) + widths[index] / 2 for index in range(len(widths))]
    pools: list[tuple[float, int]] = []  # mean and number of its members
    for want, offset in zip(wanted, before, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    starts = [min(max(mean, low), high - sum(widths)) for mean, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, before, strict=True)]


def _write(axes: Axes, label: Label, height: float, grey: str, longest: int) -> tuple[Text, Text]:
    """Draw the name and, under it, the detail; x is set later, when all widths are known."""
    common: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "bottom", "parse_math": False}
    detail = axes.text(0, height, label.detail, fontsize=8, color=grey, **common)
    name = shorten(label.name, longest)
    return axes.text(0, height + 0.055, name, fontsize=9, fontweight="bold", color=label.colour, **common), detail


def _width(axes: Axes, texts: Sequence[Text]) -> float:
    widest: float = max(text.get_window_extent().width for text in texts)
    return widest / axes.get_window_extent().width


def _heaviest(labels: Sequence[Label], widths: Sequence[float], room: float) -> list[int]:
    """Indices of the heaviest labels that fit in `room` together, in their order."""
    kept: list[int] = []
    for index in sorted(range(len(labels)), key=lambda index: -labels[index].weight):
        if widths[index] <= room:
            room -= widths[index]
            kept.append(index)
    return sorted(kept)
