"""Recorded steps → one page: how each ended, and a table of what it measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_report_steps.plan import Step
from gpu_report_steps.records import Row
from tightfit.units import format_bytes, format_seconds

__all__ = ["page"]

BYTES = {
    "allocated", "allocated_after", "bytes", "budget", "kept", "largest_difference", "left", "peak", "pinned", "ram",
    "reserved", "resident", "simulated", "told_peak",
}  # fmt: skip
SECONDS = {"clock", "denoise", "eager", "first_seconds", "seconds", "step", "told_step"}
HIDDEN = {
    "first",
    "from_cap",
    "measured",
    "model",
    "placements",
    "request",
    "steady",
    "threads",
    "vae",
}  # fmt: skip  of rows: said by the heading, or of use to us alone
KEPT_CALLS = (1, 2, 20, "after undo")
EMPTY = "–"


def page(records: Mapping[str, Row], steps: Sequence[Step], *, picture: bool, dry: bool) -> str:
    """Return the page in Markdown; `picture`: whether gpu-report.png lies beside it."""
    lines = ["# A card's first half hour", ""]
    if dry:
        lines += ["**This was the stub's card: kernels did nothing, and its times and rates mean nothing.**", ""]
    if not records:
        lines += ["No card has run it yet.", ""]
    lines += [
        "Made by `make gpu-report`, which goes on where it was. Where a cell has two values, the first was measured on "
        "the card and the second predicted for it.",
        "",
        *(["![peaks, times and rates beside the predicted ones](gpu-report.png)", ""] if picture else []),
        *_table(("step", "measures", "how it ended", "seconds"), [_ended(step, records) for step in steps]),
        "",
    ]
    for step in steps:
        record = records.get(step.name, {})
        rows = record.get("rows", [])
        if rows:
            about = _about(rows[0])
            said = f"{_capital(step.measures)}{f' ({about})' if about else ''}."
            lines += [f"## {_capital(step.name)}", "", said, "", *_rows(step, rows), ""]
    return "\n".join(lines)


def _ended(step: Step, records: Mapping[str, Row]) -> tuple[str, ...]:
    record = records.get(step.name, {})
    error = f": {record['error']}" if record.get("error") else ""
    seconds = record.get("seconds")
    return (
        step.name, step.measures, f"{record.get('status', 'not run yet')}{error}",
        EMPTY if seconds is None else f"{seconds:.0f}",
    )  # fmt: skip


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _about(row: Row) -> str:
    return ", ".join(str(row[key]) for key in ("model", "request") if row.get(key))


def _rows(step: Step, rows: Sequence[Row]) -> list[str]:
    if step.name == "tests":
        return _outcomes(rows)
    if step.name == "versions":
        return _table(("", ""), [(key, _cell(key, value)) for key, value in rows[0].items()])
    if step.name == "rates":
        return _table(("rate", "measured", "for plans", "the catalog's"), [_rate(row) for row in rows if "rate" in row])
    if step.file == "peaks.json":
        return _phases(rows)
    if step.name == "20 calls":
        rows = [row for row in rows if row.get("call") in KEPT_CALLS]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in HIDDEN]
    head = [key.replace("told", "predicted").replace("_", " ") for key in keys]
    return _table(head, [[_cell(key, row.get(key)) for key in keys] for row in rows])


def _outcomes(rows: Sequence[Row]) -> list[str]:
    """How many tests ended how, and the failures one by one."""
    counts = Counter(row["outcome"] for row in rows)
    failures = [f"- `{row['test']}`: {row.get('error', 'no message')}" for row in rows if row["outcome"] == "failed"]
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return [f"{said}.", *(["", *failures] if failures else [])]


def _rate(row: Row) -> tuple[str, ...]:
    return row["rate"], *(_cell(row["rate"], row.get(key)) for key in ("measured", "planned", "clock"))


def _phases(rows: Sequence[Row]) -> list[str]:
    """Measured and predicted bytes and seconds of each phase, and of the call."""
    cells = []
    for row in rows:
        every = [*row["phases"], {"phase": f"the call, {row['plan']}", **{k: row[k] for k in ("reserved", "seconds")}}]
        for phase in every:
            pairs = (phase.get(key) for key in ("allocated", "reserved", "seconds"))
            cells.append((phase["phase"], *map(_pair, ("allocated", "reserved", "seconds"), pairs)))
    return _table(("phase", "allocated", "reserved", "seconds"), cells)


def _pair(key: str, both: Sequence[float] | None) -> str:
    if not both:
        return EMPTY
    measured, predicted = both
    off = f", {predicted / measured - 1:+.1%}" if measured else ""
    return f"{_cell(key, measured)} ({_cell(key, predicted)}{off})"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return EMPTY
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "/").replace("\n", " ")
    for fitting, said in FORMATS:
        if fitting(key, value):
            return said(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


FORMATS: tuple[tuple[Callable[[str, Any], bool], Callable[[Any], str]], ...] = (
    (lambda key, _: key == "cap", lambda size: f"{size} GB"),
    (lambda key, _: key in BYTES, lambda size: format_bytes(int(size))),
    (lambda key, _: "_rate" in key, lambda rate: f"{format_bytes(int(rate))}/s"),
    (lambda key, _: key.endswith("overhead"), lambda seconds: f"{seconds * 1e6:.3g} µs"),
    (lambda key, value: key in SECONDS or (key == "call" and isinstance(value, float)), format_seconds),
    (lambda key, _: "." in key, lambda rate: f"{rate / 1e12:.3g} T/s"),  # of a kind of kernel and a dtype
)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
