"""Curves, axes and phase labels of a picture, from a Trace."""

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
    blocks = [(3600.0, "h", 2 * 3600.0), (60.0, "min", 180.0), (1.0, "s", 0.5), (1e-3, "ms", 0.0)]
    return next(Scale(size, name) for size, name, least in blocks if end >= least)


def _largest(top: float, blocks: list[tuple[float, str]]) -> Scale:
    return Scale(*next((block for block in blocks if top >= block[0]), blocks[-1]))


GAP = 0.018  # between two names, as a share of the axes' width
OUTSIDE = 0.08, 0.02  # how far names may reach past the axes' left and right end
LEADER = 0.045  # length of a leader, and of the space kept for one, as a share of the axes' height


@dataclass(frozen=True)
class Label:
    """A phase's name and what is said of it; `start` and `stop` are its place on the time axis."""

    name: str
    detail: str
    start: float
    stop: float
    colour: str
    weight: float  # where there is no room for all, the heaviest are named


def draw_labels(axes: Axes, labels: Sequence[Label], height: float, grey: str) -> None:
    """Draw `labels` above `height`, a share of the axes' height: as many as there is room for."""
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
    """`text` on one line of at most `most` characters.

    >>> shorten("a name far too long", 10)
    'a name fa…'
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def spread(wanted: Sequence[float], widths: Sequence[float], low: float, high: float) -> list[float]:
    """Middles for things `widths` wide: in order, apart, inside low…high, and as near to `wanted` as that allows.

    Less the widths before each, middles must only not fall. The nearest such numbers come from pooling: neighbours
    that fall share their mean.

    >>> [round(middle, 3) for middle in spread([0.0, 0.0, 0.9], [0.2, 0.2, 0.2], 0.0, 1.0)]
    [0.1, 0.3, 0.9]
    """
    before = [sum(widths[:index]) + widths[index] / 2 for index in range(len(widths))]
    pools: list[tuple[float, int]] = []  # mean and how many share it
    for want, offset in zip(wanted, before, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    starts = [min(max(mean, low), high - sum(widths)) for mean, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, before, strict=True)]


def _write(axes: Axes, label: Label, height: float, grey: str, longest: int) -> tuple[Text, Text]:
    """The name and, under it, the detail; where along the axis is decided once all widths are known."""
    common: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "bottom", "parse_math": False}
    detail = axes.text(0, height, label.detail, fontsize=8, color=grey, **common)
    name = shorten(label.name, longest)
    return axes.text(0, height + 0.055, name, fontsize=9, fontweight="bold", color=label.colour, **common), detail


def _width(axes: Axes, texts: Sequence[Text]) -> float:
    widest: float = max(text.get_window_extent().width for text in texts)
    return widest / axes.get_window_extent().width


def _heaviest(labels: Sequence[Label], widths: Sequence[float], room: float) -> list[int]:
    """Which labels to keep so that they fit in `room`, in their order."""
    kept: list[int] = []
    for index in sorted(range(len(labels)), key=lambda index: -labels[index].weight):
        if widths[index] <= room:
            room -= widths[index]
            kept.append(index)
    return sorted(kept)
