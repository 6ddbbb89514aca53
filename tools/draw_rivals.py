"""bench/results/rivals-simulated.json → docs/beside-others.png: who takes how long within which budget.

bench/results/rivals_cuda.json → docs/beside-others-cuda.png: who runs on which card, by how many bytes a step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tightfit.report.heatmap import GREY, INK, LOOK, PAPER, REFUSED, STEPS

OURS = "tightfit"
WIDE, HIGH = 0.66, 0.36  # of a cell, in inches
LEFT, RIGHT, TOP, BOTTOM = 1.75, 0.2, 0.75, 0.95  # around the cells
ABREAST = 4  # requests in a row
HEAD = 2.2  # of a cell, above the cells of a row
GAP = 0.35  # of a cell, between two models
DARK = 2.0  # from here on, letters are white


# bytes over the link in a step, both ways: up to so many GiB, and the colour of that
LINK_STEPS = tuple(
    (most, colour, words)
    for (most, words), (_, colour, _) in zip(
        (
            (0.01, "none"),
            (1.0, "to 1 GiB"),
            (3.0, "to 3 GiB"),
            (10.0, "to 10 GiB"),
            (20.0, "to 20 GiB"),
            (float("inf"), "more"),
        ),
        STEPS,
        strict=False,
    )
)
Cell = Callable[[Axes, float, int, dict[str, Any], dict[str, Any]], None]  # draws a contender's row beside ours


def draw_rivals(rows: list[dict[str, Any]], card: str, path: Path) -> None:
    """Writes the picture of `rows`, which were played on `card`, to `path` (.png)."""
    title = "A call within a budget, beside others"
    said = f"Whole calls with tightfit, and how many times as long with others: so many GiB of a simulated {card}."
    _draw_grid(rows, (title, said), _cell, STEPS, path)


def draw_rivals_cuda(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the picture of what was counted on cards of several sizes to `path` (.png)."""
    title = "Offloading on a card's own allocator, beside others"
    said = "GiB over the link in one denoising step, both ways; below, the most GiB that the allocator reserved."
    rows = [{**row, "budget": row["cap"]} for row in rows]
    _draw_grid(rows, (title, f"{said} Cards of so many GiB."), _link_cell, LINK_STEPS, path, high=0.46)


def _draw_grid(
    rows: list[dict[str, Any]],
    heading: tuple[str, str],
    cell: Cell,
    steps: tuple[tuple[float, str, str], ...],
    path: Path,
    high: float = HIGH,
) -> None:
    """A block of cells for each request, contenders by budgets, some abreast; each cell is drawn by `cell`."""
    asked = list(dict.fromkeys((row["model"], row["request"]) for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    names = sorted(names, key=lambda name: name != OURS)
    budgets = sorted({row["budget"] for row in rows})
    bands = [asked[start : start + ABREAST] for start in range(0, len(asked), ABREAST)]
    across, down = max(map(len, bands)) * (len(budgets) + GAP) - GAP, len(bands) * (HEAD + len(names))
    size = (LEFT + across * WIDE + RIGHT, TOP + down * high + BOTTOM)
    with style.context(["default", LOOK]):
        figure = Figure(figsize=size)
        figure.text(0.2 / size[0], 1 - 0.3 / size[1], heading[0], fontsize=13, weight="bold")
        figure.text(0.2 / size[0], 1 - 0.53 / size[1], heading[1], fontsize=9, color=GREY)
        box = (LEFT / size[0], BOTTOM / size[1], across * WIDE / size[0], down * high / size[1])
        axes = figure.add_axes(box, xlim=(0, across), ylim=(down, 0))
        axes.axis("off")
        for band, together in enumerate(bands):
            first = band * (HEAD + len(names)) + HEAD  # its first line of cells
            for line, name in enumerate(names):
                weight = "bold" if name == OURS else "normal"
                axes.text(-0.15, first + line + 0.5, name, ha="right", va="center", fontsize=9, weight=weight)
            for number, (model, request) in enumerate(together):
                left = number * (len(budgets) + GAP)
                axes.text(left, first - 1.3, model, fontsize=10, weight="bold")
                axes.text(left, first - 0.85, request, fontsize=8.5, color=GREY)
                own = [row for row in rows if (row["model"], row["request"]) == (model, request)]
                for place, budget in enumerate(budgets):
                    x, over = left + place, first - 0.3
                    axes.text(x + 0.5, over, f"{budget / 2**30:g}", ha="center", fontsize=8.5, color=GREY)
                    here = {row["contender"]: row for row in own if row["budget"] == budget}
                    for line, name in enumerate(names):
                        cell(axes, x, first + line, here.get(name, {}), here.get(OURS, {}))
        _legend(figure, size, steps)
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=150, facecolor=PAPER)


def _link_cell(axes: Axes, x: float, line: int, row: dict[str, Any], ours: dict[str, Any]) -> None:
    if "to_card" not in row:
        if "failed" in row:  # what was stopped, or not run, stays blank
            axes.add_patch(Rectangle((x, line), 1, 1, **REFUSED))
        return
    moved = (row["to_card"] + row["from_card"]) / 2**30
    colour = next(step[1] for step in LINK_STEPS if moved <= step[0])
    axes.add_patch(Rectangle((x, line), 1, 1, facecolor=colour, edgecolor=PAPER, linewidth=1.2))
    weight = "bold" if row["contender"] == OURS else "normal"
    text = f"{moved:.3g}" if moved >= LINK_STEPS[0][0] else "0"
    text += "*" if row.get("tiles") else ""
    axes.text(x + 0.5, line + 0.36, text, ha="center", va="center", fontsize=8.5, weight=weight)
    axes.text(x + 0.5, line + 0.75, f"{row['reserved'] / 2**30:.1f}", ha="center", va="center", fontsize=7, color=INK)


def _cell(axes: Axes, x: float, line: int, row: dict[str, Any], ours: dict[str, Any]) -> None:
    if "call" not in row:
        axes.add_patch(Rectangle((x, line), 1, 1, **REFUSED))
        return
    times = row["call"] / ours["call"] if "call" in ours else 1.0
    colour = next(colour for most, colour, _ in STEPS if times <= most)
    axes.add_patch(Rectangle((x, line), 1, 1, facecolor=colour, edgecolor=PAPER, linewidth=1.2))
    own = row["contender"] == OURS
    text = _short(row["call"]) if own else f"{times:.2f}{'*' if row.get('tiles') else ''}"
    ink = PAPER if times > DARK else INK
    axes.text(
        x + 0.5, line + 0.52, text, ha="center", va="center", fontsize=8, color=ink, weight="bold" if own else "normal"
    )


def _short(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 3600 else f"{seconds / 3600:.3g} h"


def _legend(figure: Figure, size: tuple[float, float], steps: tuple[tuple[float, str, str], ...]) -> None:
    across, high = size
    x, y = 0.2, 0.5
    named = [({"facecolor": colour, "edgecolor": GREY, "linewidth": 0.4}, words) for _, colour, words in steps]
    if steps is STEPS:
        named[0] = named[0][0], "as long (within 1 %)"
    for facts, words in [*named, (REFUSED, "does not fit")]:
        figure.add_artist(Rectangle((x / across, y / high), 0.26 / across, 0.18 / high, **facts))
        figure.text((x + 0.32) / across, (y + 0.09) / high, words, va="center", fontsize=8.5)
        x += 0.32 + 0.07 * len(words) + 0.2
    said = "* with diffusers' tiles, because the autoencoder was too large: other pictures"
    figure.text(0.2 / across, 0.22 / high, said, va="center", fontsize=8.5, color=GREY)
