"""A Chart → its picture: models by cards, coloured by what too little memory costs, with time, peak and level.

`draw_chart` reads as the picture's parts.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from threading import Lock
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tightfit.chart import Cell, Chart, ChartedModel
from tightfit.report.chart import ram_words
from tightfit.units import format_bytes, format_seconds

__all__ = ["draw_chart"]

INK, GREY, PAPER, HATCH = "#24292f", "#57606a", "#ffffff", "#8c959f"
# up to so many times as long as with memory without end, and the colour of that
STEPS = (
    (1.01, "#dcefe2", "not at all (within 1 %)"),
    (1.05, "#fdf3d0", "to 1.05 ×"),
    (1.1, "#fbdf9d", "to 1.1 ×"),
    (1.25, "#f6bd6f", "to 1.25 ×"),
    (1.5, "#ea9a4f", "to 1.5 ×"),
    (2.0, "#d9713c", "to 2 ×"),
    (float("inf"), "#b3452f", "more"),
)
DARK = 2.0  # from here on, letters are white
WIDE, HIGH = 1.14, 0.66  # of a cell, in inches
LEFT, RIGHT, TOP, BOTTOM = 1.75, 0.25, 1.62, 1.18  # around the cells
LOOK: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "tightfit",  # the same chart gives the same file
}
_drawing = Lock()  # matplotlib's settings and text engine are shared by all threads


def draw_chart(chart: Chart, path: Path, kind: str) -> None:
    """Write the picture of `chart` to `path`; `kind` is "png" or "svg"."""
    with _drawing, style.context(["default", LOOK]):
        figure = _compose(chart)
        figure.savefig(path, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)


def _compose(chart: Chart) -> Figure:
    """The picture, from top to bottom."""
    columns, rows = max(len(chart.cards), 7), len(chart.models)
    size = (LEFT + columns * WIDE + RIGHT, TOP + rows * HIGH + BOTTOM)
    figure = Figure(figsize=size, facecolor=PAPER)
    FigureCanvasAgg(figure)
    place = (LEFT / size[0], BOTTOM / size[1], columns * WIDE / size[0], rows * HIGH / size[1])
    axes = figure.add_axes(place, xlim=(0, columns), ylim=(rows, 0))
    axes.set_axis_off()
    _heading(figure, chart, size)
    for column, card in enumerate(chart.cards):
        axes.text(column + 0.5, -0.36, format_bytes(card.bytes), ha="center", va="bottom", fontsize=10, weight="bold")
        axes.text(column + 0.5, -0.12, card.name, ha="center", va="bottom", fontsize=8.5, color=GREY)
    for row, model in enumerate(chart.models):
        _name(axes, row, model)
        for column, card in enumerate(chart.cards):
            cell = chart.cell(model.name, card.name)
            if cell is not None:
                _cell(axes, column, row, cell)
    _legend(figure, size)
    return figure


def _heading(figure: Figure, chart: Chart, size: tuple[float, float]) -> None:
    across, high = size
    title = "What each card does with each model, losslessly"
    figure.text(0.25 / across, 1 - 0.32 / high, title, fontsize=15, weight="bold", va="center")
    said = (
        "In each cell: the time of one picture or clip, the most memory it takes, "
        "and the lowest of the levels 0 (all on the card) to 3 (the denoiser streams) that fits. Time and memory are "
        "those of the plan that tightfit makes for the card; “own plan”: it fits, and no level does. "
        f"Predicted, no card was timed. {ram_words(chart.ram)}."
    )
    lines = textwrap.wrap(said, int((across - 0.5) / 0.0655))
    figure.text(0.25 / across, 1 - 0.55 / high, "\n".join(lines), color=GREY, va="top", linespacing=1.35)


def _name(axes: Axes, row: int, model: ChartedModel) -> None:
    axes.text(-0.09, row + 0.4, model.name, ha="right", va="center", fontsize=10, weight="bold")
    axes.text(-0.09, row + 0.68, model.request.described, ha="right", va="center", fontsize=7.5, color=GREY)


def _cell(axes: Axes, column: int, row: int, cell: Cell) -> None:
    box: dict[str, Any] = {"xy": (column + 0.02, row + 0.03), "width": 0.96, "height": 0.94}
    level = "own plan" if cell.level is None else f"level {cell.level}"
    if cell.seconds is None or cell.slowdown is None or cell.peak_bytes is None:
        axes.add_patch(Rectangle(**box, facecolor="#eef0f2", edgecolor=HATCH, hatch="////", linewidth=0.6))
        lines = ["does not fit", cell.words, "" if cell.level is None else f"{level}, lossy"]
        ink, around = INK, {"facecolor": "#eef0f2", "edgecolor": "none", "pad": 1.2}
    else:
        axes.add_patch(Rectangle(**box, facecolor=_colour(cell.slowdown), edgecolor="none"))
        lines = [format_seconds(cell.seconds), format_bytes(cell.peak_bytes), level]
        ink, around = (PAPER if cell.slowdown > DARK else INK), None
    for line, (height, size, weight) in zip(
        lines, ((0.26, 9, "bold"), (0.53, 8, "normal"), (0.78, 8, "normal")), strict=True
    ):
        if line:
            axes.text(
                column + 0.5, row + height, line, ha="center", va="center", fontsize=size, weight=weight, color=ink,
                bbox=around,
            )  # fmt: skip


def _colour(slowdown: float) -> str:
    return next(colour for most, colour, _ in STEPS if slowdown <= most)


def _legend(figure: Figure, size: tuple[float, float]) -> None:
    """What the colours mean, in one row below the cells."""
    across, high = size
    said = "How much longer it takes than on a card of the same speed with memory without end:"
    figure.text(0.25 / across, 0.86 / high, said, va="center", fontsize=9.5)
    x, y = 0.25, 0.42
    for _, colour, words in STEPS:
        figure.add_artist(
            Rectangle(
                (x / across, y / high), 0.26 / across, 0.2 / high, facecolor=colour, edgecolor=GREY, linewidth=0.4
            )
        )
        figure.text((x + 0.32) / across, (y + 0.1) / high, words, va="center", fontsize=8.5)
        x += 0.32 + 0.072 * len(words) + 0.2
    look: dict[str, Any] = {"facecolor": "#eef0f2", "edgecolor": HATCH, "hatch": "////", "linewidth": 0.6}
    figure.add_artist(Rectangle((x / across, y / high), 0.26 / across, 0.2 / high, **look))
    figure.text((x + 0.32) / across, (y + 0.1) / high, "does not fit", va="center", fontsize=8.5)
