"""Names above a strip of phases, however narrow some phases are: side by side, in order, with leaders to the narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text

__all__ = ["Label", "draw_labels", "shorten", "spread"]

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
