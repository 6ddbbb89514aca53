"""A Chart or a LevelTable → text for a terminal of 100 columns, or Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tightfit.catalog.clock import UNCERTAINTY
from tightfit.report.summary import align
from tightfit.schema.chart import Cell, Chart, ChartedCard, ChartedModel, Largest, LevelRow, LevelTable
from tightfit.schema.request import Request
from tightfit.units import format_bytes, format_seconds

__all__ = [
    "NONE",
    "SEVERAL",
    "as_markdown",
    "card_words",
    "describe_chart",
    "describe_levels",
    "largest_words",
    "levels_as_markdown",
    "numbers",
    "ram_words",
]

WIDE = 100  # columns
NONE = "–"
PRESETS = "0 all on the card, 1 and autoencoder in tiles, 2 and encoders offloaded, 3 and denoiser streamed"
LEGEND = (
    f"level: the lowest preset that fits ({PRESETS}); {NONE}: none does, only the plan that is made for the card",
    "peak, time, plan: of the plan that is made for the card, which is lossless, and what tightfit does by itself; "
    "predicted, of one call with all weights in RAM: no card was timed",
    f"time: ± {100 * UNCERTAINTY:.0f} %, and more for small models, whose time depends on the processor",
    "slower: times as long as on a card of the same speed with memory without end",
    "largest: of the sizes that were tried, the largest that fits; +: nothing larger was tried; *: the model takes no "
    "more",
    "streams X 12 %: 12 % of X's weights are on the card at a time; components not named are resident",
)
SEVERAL = (
    "2xCARD: two of them in one computer, which share the rows of a call, or its guidance; peak: of each; level, "
    "largest: not tried"
)
_HEADINGS = ("card", "level", "peak", "time", "slower", "largest", "plan")


def describe_chart(chart: Chart) -> str:
    """Return the chart as text: a table for each model, then a legend of the columns."""
    lines = []
    for model in chart.models:
        lines += [*textwrap.wrap(f"{model.name}: {_asked(model.request)}", WIDE), *_block(chart, model), ""]
    said = [*_legend(chart), ram_words(chart.ram)]
    return "\n".join([*lines, *(line for each in said for line in textwrap.wrap(each, WIDE, subsequent_indent="  "))])


def _block(chart: Chart, model: ChartedModel) -> Iterator[str]:
    """Lines of one model's table, with the last column wrapped."""
    rows = [_HEADINGS, *_rows(chart, model)]
    heads = align([row[:-1] for row in rows])
    room = WIDE - len(heads[0]) - 2
    for head, row in zip(heads, rows, strict=True):
        first, *rest = textwrap.wrap(row[-1], room) or [""]
        yield f"{head}  {first}"
        yield from (" " * (len(head) + 2) + line for line in rest)


def _rows(chart: Chart, model: ChartedModel) -> Iterator[tuple[str, ...]]:
    for card in chart.cards:
        if (cell := chart.cell(model.name, card.name)) is not None:
            faster = "" if cell.speedup is None else f"{cell.speedup:.2f} × as fast as one; "
            yield (card_words(card), *numbers(cell), faster + cell.summary)


def numbers(cell: Cell) -> tuple[str, ...]:
    """Return the cells of a row: level, peak, time, slowdown, largest request."""
    level = NONE if cell.level is None else str(cell.level)
    peak = NONE if cell.peak_bytes is None else format_bytes(cell.peak_bytes)
    time = "refused" if cell.seconds is None else format_seconds(cell.seconds)
    slower = NONE if cell.slowdown is None else f"{cell.slowdown:.2f} ×"
    return level, peak, time, slower, largest_words(cell.largest)


def as_markdown(chart: Chart) -> str:
    """Return the chart as Markdown: one table of levels and times, then a table for each model."""
    head = ("", *(f"{card.name}<br>{format_bytes(card.bytes)}" for card in chart.cards))
    rows = [
        (model.name, *(_in_short(chart.cell(model.name, card.name)) for card in chart.cards)) for model in chart.models
    ]
    parts = [_table(head, rows), "\n".join(f"- {line}" for line in (*_legend(chart), ram_words(chart.ram)))]
    for model in chart.models:
        parts += [f"## {model.name}", f"{_asked(model.request)}.", _table(_HEADINGS, list(_rows(chart, model)))]
        parts += [f"Beyond that it says: {words}" for words in _refusals(chart, model)]
    return "\n\n".join(parts) + "\n"


def _legend(chart: Chart) -> tuple[str, ...]:
    return (*LEGEND, SEVERAL) if any(card.count > 1 for card in chart.cards) else LEGEND


def _in_short(cell: Cell | None) -> str:
    if cell is None:
        return ""
    level = NONE if cell.level is None else str(cell.level)
    return f"**{level}** refused" if cell.seconds is None else f"**{level}** {format_seconds(cell.seconds)}"


def _refusals(chart: Chart, model: ChartedModel) -> list[str]:
    cells = [chart.cell(model.name, card.name) for card in chart.cards]
    said = (cell.largest.refusal for cell in cells if cell and cell.largest and cell.largest.refusal)
    return [f"“{words}”" for words in dict.fromkeys(said)]


def describe_levels(table: LevelTable) -> str:
    """Return two lines for each level: its numbers, and what is on the device."""
    heads = align([("", "needs", "fits", "time", "speed"), *(_level_numbers(row) for row in table.rows)])
    lines = [heads[0]]
    for head, row in zip(heads[1:], table.rows, strict=True):
        lines += [head, *textwrap.wrap(_there(row), WIDE, initial_indent=" " * 6, subsequent_indent=" " * 8)]
    return "\n".join([f"{_title(table)}.", "", *lines])


def levels_as_markdown(table: LevelTable) -> str:
    head = ("", "needs", "fits", "time", "speed", "denoiser", "encoders", "VAE")
    rows = [(*_level_numbers(row), row.denoiser, row.encoders, row.autoencoder) for row in table.rows]
    return f"{_title(table)}.\n\n{_table(head, rows)}\n"


def _title(table: LevelTable) -> str:
    room = f"{format_bytes(table.card.usable_bytes)} of {format_bytes(table.card.bytes)}"
    return f"{table.model}: {_asked(table.request)}; on {table.card.name}, of which {room} may be used"


def _level_numbers(row: LevelRow) -> tuple[str, ...]:
    name = "made for the card" if row.level is None else f"level {row.level}"
    seconds, speed = format_seconds(row.seconds), f"{row.speed:.2f} ×"
    return (
        name + " (lossy)" * bool(row.lossy),
        format_bytes(row.needed_bytes),
        "yes" if row.fits else "no",
        seconds,
        speed,
    )


def _there(row: LevelRow) -> str:
    return f"on the card: denoiser {row.denoiser}; encoders {row.encoders}; VAE {row.autoencoder}"


def card_words(card: ChartedCard) -> str:
    return f"{card.name} {format_bytes(card.bytes)}"


def largest_words(largest: Largest | None) -> str:
    """Return the frames of a clip or the sides of an image; LEGEND explains + and *."""
    if largest is None:
        return NONE
    asked = largest.request
    size = f"{asked.frames} frames" if asked.frames else f"{asked.width}×{asked.height}"
    return size + {"card": "", "ladder": "+", "model": "*"}[largest.limit]


def ram_words(ram: int | None) -> str:
    if ram is None:
        return "RAM: taken to be as much as is wanted"
    return f"RAM: {format_bytes(ram)} for weights and maps that wait, an ordinary disk for the rest"


def _asked(request: Request) -> str:
    return request.described + (f", {request.steps} steps" if request.steps else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)
