"""A Chart or a LevelTable → text, or a file of the kind that its suffix says, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from tightfit.chart import Chart, LevelTable
from tightfit.errors import InputError
from tightfit.files import replacing
from tightfit.report.chart import as_markdown, describe_chart, describe_levels, levels_as_markdown

__all__ = ["chart_text", "check_out", "write_chart"]

TEXTS, PICTURES = (".md", ".json"), (".png", ".svg")


def check_out(out: Path, *, levels: bool) -> None:
    """InputError now if a chart, or a level table, could not be written to `out` later."""
    from tightfit.run.files import check_writable

    kinds = TEXTS if levels else (*PICTURES, *TEXTS)
    if out.suffix.lower() not in kinds:
        what = "a level table" if levels else "a chart"
        raise InputError(f"--out {out}: {what} is written as {', '.join(kinds[:-1])} or {kinds[-1]}", out=str(out))
    check_writable(out)


def chart_text(made: Chart | LevelTable) -> str:
    """What a terminal shows."""
    return describe_chart(made) if isinstance(made, Chart) else describe_levels(made)


def write_chart(made: Chart | LevelTable, out: Path) -> None:
    """Writes `out`, whose suffix was checked."""
    kind = out.suffix.lower()
    with replacing(out) as partial:
        if kind == ".json":
            partial.write_text(made.to_json(indent=2) + "\n")
        elif kind == ".md":
            partial.write_text(as_markdown(made) if isinstance(made, Chart) else levels_as_markdown(made))
        elif isinstance(made, Chart):
            from tightfit.report.heatmap import draw_chart

            draw_chart(made, partial, kind.removeprefix("."))
