"""A Chart → a heatmap: models by cards, coloured by slowdown, with time, peak and level."""

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

from tightfit.report.chart import ram_words
from tightfit.schema.chart import Cell, Chart, ChartedCard, ChartedModel
from tightfit.units import format_bytes, format_seconds

__all__ = ["draw_chart"]

INK, GREY, PAPER, HATCH = "#24292f", "#57606a", "#ffffff", "#8c959f"
# largest slowdown against unlimited memory, colour, and text of the legend
STEPS = (
    (1.01, "#dcefe2", "not at all (within 1 %)"),
    (1.05, "#fdf3d0", "to 1.05 ×"),
    (1.1, "#fbdf9d", "to 1.1 ×"),
    (1.25, "#f6bd6f", "to 1.25 ×"),
    (1.5, "#ea9a4f", "to 1.5 ×"),
    (2.0, "#d9713c", "to 2 ×"),
    (float("inf"), "#b3452f", "more"),
)
DARK = 2.0  # slowdown above which text is white
# lowest level that fits → colours of the band at the bottom of a cell, and of its text
BANDS = {
    0: ("#eef3f8", INK), 1: ("#cfdeec", INK), 2: ("#a9c4dd", INK), 3: ("#7fa8cd", INK), None: ("#2f5f8f", PAPER),
}  # fmt: skip
BAND = 0.29  # height of the band, as a fraction of a cell's height
WIDE, HIGH = 1.14, 0.66  # of a cell, in inches
LEFT, RIGHT, TOP, BOTTOM = 1.75, 0.25, 1.25, 1.18  # margins around the cells, in inches
LETTER, LINE = 0.069, 0.18  # width of a letter and height of a line of the subtitle, in inches
FEWEST = 7  # columns: the least width of the figure, for the legend
REFUSED: dict[str, Any] = {"facecolor": "#eef0f2", "edgecolor": HATCH, "hatch": "////", "linewidth": 0.6}
LOOK: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "tightfit",  # the same chart gives the same file
}
_drawing = Lock()  # matplotlib's settings and text engine are shared by all threads


def draw_chart(chart: Chart, path: Path, kind: str) -> None:
    """Write the heatmap of `chart` to `path`; `kind` is "png" or "svg"."""
    with _drawing, style.context(["default", LOOK]):
        figure = _compose(chart)
        figure.savefig(path, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)


def _compose(chart: Chart) -> Figure:
    """Compose the figure, from top to bottom."""
    columns, rows = max(len(chart.cards), FEWEST), len(chart.models)
    across = LEFT + columns * WIDE + RIGHT
    said = textwrap.wrap(_subtitle(chart), int((across - 0.5) / LETTER))
    top = TOP + LINE * len(said)
    size = (across, top + rows * HIGH + BOTTOM)
    figure = Figure(figsize=size, facecolor=PAPER)
    FigureCanvasAgg(figure)
    place = (LEFT / size[0], BOTTOM / size[1], columns * WIDE / size[0], rows * HIGH / size[1])
    axes = figure.add_axes(place, xlim=(0, columns), ylim=(rows, 0))
    axes.set_axis_off()
    _heading(figure, said, size)
    for column, card in enumerate(chart.cards):
        axes.text(column + 0.5, -0.36, format_bytes(card.bytes), ha="center", va="bottom", fontsize=10, weight="bold")
        axes.text(column + 0.5, -0.12, _name_of(card), ha="center", va="bottom", fontsize=8.5, color=GREY)
    for row, model in enumerate(chart.models):
        _name(axes, row, model)
        for column, card in enumerate(chart.cards):
            cell = chart.cell(model.name, card.name)
            if cell is not None:
                _cell(axes, column, row, cell, card.count)
    _legend(figure, size)
    return figure


def _subtitle(chart: Chart) -> str:
    said = [
        "In each cell: the time of one picture or clip and the most memory it takes, under the plan that tightfit "
        "makes for the card."
    ]
    if any(card.count == 1 for card in chart.cards):
        said.append(
            "Below, in blue: the lowest level that fits, from 0 (all on the card) to 3 (the denoiser streams); “own "
            "plan”: no level fits, only that plan does."
        )
    if any(card.count > 1 for card in chart.cards):
        said.append("Several cards share each call: the memory is of each; below, how many times as fast as one.")
    return " ".join([*said, "Predicted, no card was timed.", f"{ram_words(chart.ram)}."])


def _heading(figure: Figure, said: list[str], size: tuple[float, float]) -> None:
    across, high = size
    title = "What each card does with each model, losslessly"
    figure.text(0.25 / across, 1 - 0.32 / high, title, fontsize=15, weight="bold", va="center")
    figure.text(0.25 / across, 1 - 0.55 / high, "\n".join(said), color=GREY, va="top", linespacing=1.35)


def _name_of(card: ChartedCard) -> str:
    return card.name if card.count == 1 else f"{card.count} × {card.card}"


def _name(axes: Axes, row: int, model: ChartedModel) -> None:
    axes.text(-0.09, row + 0.4, model.name, ha="right", va="center", fontsize=10, weight="bold")
    axes.text(-0.09, row + 0.68, model.request.size, ha="right", va="center", fontsize=7.5, color=GREY)


def _cell(axes: Axes, column: int, row: int, cell: Cell, cards: int) -> None:
    refused = cell.seconds is None or cell.slowdown is None or cell.peak_bytes is None
    box: dict[str, Any] = {"xy": (column + 0.02, row + 0.03), "width": 0.96, "height": 0.94}
    if refused:
        axes.add_patch(Rectangle(**box, **REFUSED))
        _write(axes, column, row + 0.25, "does not fit", size=9, weight="bold", around=True)
        _write(axes, column, row + 0.5, cell.summary, around=True)
    else:
        axes.add_patch(Rectangle(**box, facecolor=_colour(cell.slowdown or 1), edgecolor="none"))
        ink = PAPER if (cell.slowdown or 1) > DARK else INK
        _write(axes, column, row + 0.23, format_seconds(cell.seconds or 0), size=9, weight="bold", ink=ink)
        _write(axes, column, row + 0.5, format_bytes(cell.peak_bytes or 0), ink=ink)
    if refused and cell.level is None:
        return
    if cards > 1:
        faster = "one is too small" if cell.speedup is None else f"{cell.speedup:.2f} × as fast"
        _write(axes, column, row + 0.97 - BAND / 2, faster, ink=ink)
        return
    colour, ink = BANDS[cell.level]
    axes.add_patch(Rectangle((column + 0.02, row + 0.97 - BAND), 0.96, BAND, facecolor=colour, edgecolor="none"))
    level = "own plan" if cell.level is None else f"level {cell.level}" + ", lossy" * refused
    _write(axes, column, row + 0.97 - BAND / 2, level, ink=ink)


def _write(
    axes: Axes, column: int, y: float, text: str, *, size: float = 8, weight: str = "normal", ink: str = INK,
    around: bool = False,
) -> None:  # fmt: skip
    """Write `text` centred in `column`; with `around`, on its own background."""
    paper = {"facecolor": REFUSED["facecolor"], "edgecolor": "none", "pad": 1.2} if around else None
    axes.text(column + 0.5, y, text, ha="center", va="center", fontsize=size, weight=weight, color=ink, bbox=paper)


def _colour(slowdown: float) -> str:
    return next(colour for most, colour, _ in STEPS if slowdown <= most)


def _legend(figure: Figure, size: tuple[float, float]) -> None:
    """Draw the legend of the colours, in one row below the cells."""
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
    figure.add_artist(Rectangle((x / across, y / high), 0.26 / across, 0.2 / high, **REFUSED))
    figure.text((x + 0.32) / across, (y + 0.1) / high, "does not fit", va="center", fontsize=8.5)
