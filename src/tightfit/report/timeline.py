"""A Report → a figure of one call: bytes of weights and activations on the device over time, by phase."""

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
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tightfit.errors import InputError
from tightfit.files import replacing
from tightfit.report.figure import Curve, Label, Scale, bytes_scale, draw_labels, seconds_scale, shorten
from tightfit.report.summary import MOST_ROWS, Report, fold_phases
from tightfit.schema.results import PhaseTrace
from tightfit.units import format_bytes, format_seconds

__all__ = ["draw_timeline"]

INK, GREY, HAIR = "#24292f", "#6a737d", "#c9ced6"
WEIGHTS, ACTIVATIONS, LIMIT = "#5f7f9d", "#e3a765", "#b3424a"
PHASES = ("#44546a", "#3f7f7b", "#84608a", "#7d7a3c", "#a0603f", "#5b6fa8")
WIDE, HIGH = 10.0, 5.0  # inches
LEFT, BOTTOM, TOP = 0.085, 0.17, 0.70  # edges of the axes, as fractions of the figure
LOOK: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "svg.hashsalt": "tightfit",  # the same trace gives the same file
}
FAR = 2.5  # a budget of more than this many times the peak is named, not drawn: it would flatten the curve
_drawing = Lock()  # matplotlib's settings and text engine are shared by all threads


def draw_timeline(report: Report, path: Path, title: str | None = None) -> None:
    """Write the timeline of `report` to `path`: a PNG or an SVG, by its suffix.

    Raises InputError for another suffix and for a missing folder. The file is written atomically.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise InputError(f"a timeline is written as .png or .svg, not {path.name!r}", path=str(path))
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is no file", path=str(path))
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} to", path=str(path))
    with _drawing, style.context(["default", LOOK]):
        _save(_compose(report, title), path, kind)


def _save(figure: Figure, path: Path, kind: str) -> None:
    with replacing(path) as partial:
        figure.savefig(partial, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)


def _compose(report: Report, title: str | None) -> Figure:
    """Compose the figure, from top to bottom."""
    curve = Curve.of(report.trace)
    limit = report.plan.budget.of(report.plan.device) if report.plan.budget else None
    drawn_limit = limit if limit and limit <= FAR * max(curve.peak, 1) else None
    top = 1.2 * max(curve.peak, drawn_limit or 0, 1)
    memory, time = bytes_scale(top), seconds_scale(curve.end)
    figure = Figure(figsize=(WIDE, HIGH), facecolor="white")
    FigureCanvasAgg(figure)
    right = 0.895 if drawn_limit else 0.97
    axes = figure.add_axes((LEFT, BOTTOM, right - LEFT, TOP - BOTTOM))
    axes.set(xlim=(0, time.of(curve.end)), ylim=(0, memory.of(top)))
    _dress(axes, memory, time)
    _areas(axes, curve, memory, time)
    _phases(axes, report.trace.phases, time)
    if drawn_limit:
        _limit(axes, drawn_limit, memory)
    if curve.peak:
        _peak(axes, curve, limit, drawn_limit, memory, time)
    _heading(figure, report, title)
    _legend(figure, right)
    _footer(figure, report, curve, limit if limit != drawn_limit else None)
    return figure


def _dress(axes: Axes, memory: Scale, time: Scale) -> None:
    """Style the axes, with a light grid."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(HAIR)
    axes.tick_params(length=0, labelcolor=GREY, labelsize=8.5, pad=5)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=memory.name == "B"))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: memory.label(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: time.label(value)))
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.7)
    axes.set_axisbelow(True)


def _areas(axes: Axes, curve: Curve, memory: Scale, time: Scale) -> None:
    """Draw weights with activations stacked on top; each value holds until the next sample."""
    seconds, weights = curve.seconds / time.size, curve.weights / memory.size
    total = weights + curve.activations / memory.size
    axes.fill_between(seconds, 0, weights, step="post", color=WEIGHTS, linewidth=0)
    axes.fill_between(seconds, weights, total, step="post", color=ACTIVATIONS, linewidth=0)


def _phases(axes: Axes, phases: tuple[PhaseTrace, ...], time: Scale) -> None:
    """Draw a bar above the plot, one colour per phase name, with the names above it."""
    names = dict.fromkeys(phase.name for phase in phases)
    colours = {name: PHASES[index % len(PHASES)] for index, name in enumerate(names)}
    across = axes.get_xaxis_transform()
    for phase in sorted(phases, key=lambda phase: -phase.seconds):  # shortest last, to be visible
        start, length = time.of(phase.start), time.of(phase.seconds)
        look: dict[str, Any] = {"color": colours[phase.name], "linewidth": 0.6, "clip_on": False, "transform": across}
        axes.add_patch(Rectangle((start, 1.015), length, 0.028, **look))
        if len(phases) <= MOST_ROWS:
            axes.axvline(start, color=HAIR, linewidth=0.7, zorder=0.6)
    draw_labels(axes, _labels(phases, colours, time), height=1.045, grey=GREY)


def _labels(phases: tuple[PhaseTrace, ...], colours: dict[str, str], time: Scale) -> list[Label]:
    """One label per phase, or per name if there are more than MOST_ROWS phases."""
    labels = []
    for shown in phases if len(phases) <= MOST_ROWS else fold_phases(phases):
        alike = [shown] if len(phases) <= MOST_ROWS else [phase for phase in phases if phase.name == shown.name]
        detail = f"{format_seconds(shown.seconds)} · {format_bytes(shown.peak_bytes)}"
        times = f" \u00d7{len(alike)}" if len(alike) > 1 else ""
        stop = time.of(max(phase.start + phase.seconds for phase in alike))
        start = time.of(alike[0].start)
        labels.append(Label(shown.name + times, detail, start, stop, colours[shown.name], shown.peak_bytes))
    return labels


def _limit(axes: Axes, limit: int, memory: Scale) -> None:
    axes.axhline(memory.of(limit), color=LIMIT, linewidth=1.1, dashes=(5, 3))
    place = (1, memory.of(limit))
    axes.annotate(
        f"budget\n{format_bytes(limit)}", place, xytext=(6, 0), xycoords=axes.get_yaxis_transform(),
        textcoords="offset points", va="center", fontsize=8.5, color=LIMIT,
    )  # fmt: skip


def _peak(axes: Axes, curve: Curve, limit: int | None, drawn: int | None, memory: Scale, time: Scale) -> None:
    """Mark the peak with a dot and its size in bytes, clear of the budget line and of the edges."""
    over = limit is not None and curve.peak > limit
    text = f"peak {format_bytes(curve.peak)}" + (f", {format_bytes(curve.peak - limit)} over" if limit and over else "")
    x, y = time.of(curve.peak_at), memory.of(curve.peak)
    share = curve.peak_at / curve.end
    side = "left" if share < 0.12 else "right" if share > 0.88 else "center"
    bottom, top = axes.get_ylim()
    points = (TOP - BOTTOM) * HIGH * 72 / (top - bottom)  # points per unit of the bytes axis
    gap = (memory.of(drawn) - y) * points if drawn else -1
    lift = gap + 5 if 0 <= gap < 20 else 7
    axes.plot([x], [y], marker="o", markersize=4.5, color=LIMIT if over else INK, clip_on=False, zorder=5)
    axes.annotate(
        text, (x, y), xytext=({"left": -3, "right": 3}.get(side, 0), lift), textcoords="offset points", ha=side,
        va="bottom",
        fontsize=9, fontweight="bold", color=LIMIT if over else INK, zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def _heading(figure: Figure, report: Report, title: str | None) -> None:
    trace = report.trace
    said = shorten(title, 110) if title else f"Memory during call {trace.call} on {trace.device}"
    text = figure.text(LEFT, 0.945, said, fontsize=13, fontweight="bold", va="center", parse_math=False)
    text.set_fontsize(13 * min(1, 0.87 * figure.bbox.width / text.get_window_extent().width))
    rss = f" · RAM peak {format_bytes(trace.rss_peak_bytes)}" if trace.rss_peak_bytes else ""
    facts = f"tensor bytes on the device over {format_seconds(trace.seconds)}{rss}"
    figure.text(LEFT, 0.89, facts, color=GREY, va="center", parse_math=False)


def _legend(figure: Figure, right: float) -> None:
    for x, name, colour in ((right - 0.177, "weights", WEIGHTS), (right - 0.083, "activations", ACTIVATIONS)):
        figure.add_artist(Rectangle((x, 0.881), 0.009, 0.018, color=colour, linewidth=0))
        figure.text(x + 0.014, 0.89, name, color=GREY, va="center")


def _footer(figure: Figure, report: Report, curve: Curve, far_limit: int | None) -> None:
    plan, lossy = report.plan, [name.partition(":")[0] for name in report.trace.lossy]
    moved: dict[str, list[str]] = {}
    for name, part in plan.components.items():
        if part.placement != "resident":
            moved.setdefault(part.placement, []).append(name)
    parts = [
        "custom plan" if plan.level is None else f"level {plan.level}",
        report.trace.device,
        f"lossy: {', '.join(dict.fromkeys(lossy))}" if lossy else "lossless",
        f"budget {format_bytes(far_limit)}, above this chart" if far_limit else "",
        *(f"{placement}: {', '.join(names)}" for placement, names in moved.items()),
        "" if curve.sampled or not report.trace.phases else "no samples: each phase is drawn at its peak",
    ]
    line = " · ".join(filter(None, parts))
    lines = textwrap.wrap(line, 115, max_lines=2, placeholder=" …", break_on_hyphens=False)
    figure.text(LEFT, 0.075, "\n".join(lines), color=GREY, fontsize=8.5, va="top", parse_math=False, linespacing=1.4)
