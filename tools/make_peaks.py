"""bench/results/peaks-cuda.json → docs/peaks.md: every number in it.

python tools/make_peaks.py          # write it
python tools/make_peaks.py --check  # exit 1 if that would change it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/peaks.md"
FACTS = ROOT / "bench/results/peaks-cuda.json"
PUBLISHED = ROOT / "bench/results/published.json"
COLUMNS = {"copies": "as assumed", "0": "none", "twice": "twice that"}
OLD = "†"  # measured with an older version of the code
HEAD = """# Peaks by torch's own allocator

`bench/peaks_cuda.py` calls known models at full size on a stand-in for the CUDA runtime: torch's own CUDA build, its
caching allocator, its streams and its limits, without a card. Weights are memory that nobody touches, and only small
tensors are computed. So this compares layouts, the order of requests, the allocator and its limits with the
prediction. It does not compare cuDNN or a real card: how large a convolution's workspace is, is the stand-in's choice,
as many bytes as are assumed, none, or twice as many.

Differences are prediction less torch, the largest of a call's three phases. "Exact" means that allocated and reserved
bytes are equal to the byte in every phase. For budgets, the cap was kept unless a cell says otherwise.

"""
CAUSES = """## What remains

- Not simulated: the buffer through which torch splits a sum with few outputs among a card's processors
  (`setReduceConfig` in Reduce.cuh; it depends on how many there are), and what cuFFT and cub's sorting ask for.
- Decodes of clips near their cap, where the allocator gives back its cache again and again: what is reserved is up to
  7 % off. CogVideoX within 5.4 GB allocates 213 MB more than was rehearsed, and less than the plan's forecast.
- torch 2.11 takes, of several free blocks of the same size, the one with the lowest address, which is the driver's
  choice. So with 2.11 reserved bytes can be off, and allocated ones by up to 1 MiB. This page is for the version
  named above.
- With another workspace than is assumed, peaks differ by what convolutions hold; that is the point of these columns.
- Rows with {old} were measured with an older version of the code. There, outputs under a budget were copied on the card
  first (up to 15 MB in each phase), values that a pipeline reads back were garbage (Wan's text encoder made a mask of
  30 MB for it; flux.2-dev and sd-1.5 could not run), kernels' buffers beside their outputs were partly missing, and
  torch's choice among free blocks of the same size was not known (up to 5 % of what is reserved).
"""


def worst(row: dict[str, Any], what: str) -> float:
    """The largest difference of a phase, in bytes, or for reserved bytes as a share."""
    pairs = [phase[what] for phase in row["phases"]]
    if what == "allocated":
        return max((mine - real for real, mine in pairs), key=abs, default=0)
    return max((mine / real - 1 for real, mine in pairs), key=abs, default=0.0)


def is_exact(row: dict[str, Any]) -> bool:
    return all(real == mine for phase in row["phases"] for real, mine in (phase["allocated"], phase["reserved"]))


def is_above(row: dict[str, Any]) -> bool:
    return row["budget"] is not None and row["reserved"] > row["budget"]


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    old = "" if "commit" in row else f" {OLD}"
    if "refused" in row:
        within = "BudgetTooSmall" in row["refused"]
        return "refused: too small" if within else f"not measured: {row['refused'][:60].replace('|', '/')}{old}"
    limit = ", **above the cap**" if is_above(row) else ""
    ended = f", ended with {row['failed'][:60]}" if row["failed"] else ""
    if is_exact(row):
        return f"exact{limit}{ended}{old}"
    return f"{worst(row, 'allocated') / 1e6:+,.2f} MB, {worst(row, 'reserved'):+.2%}{limit}{ended}{old}"


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "phases" in row and not row["failed"]]


def title(row: dict[str, Any]) -> str:
    return f"level {row['level']}" if row["level"] is not None else f"{row['card']} GB card"


def summary(rows: list[dict[str, Any]]) -> str:
    """For each workspace, how near predictions came and whether caps and forecasts held."""
    lines = [
        "| workspace | rows | measured | exact | allocated within 1 MB | reserved within 0.5 % | with a budget "
        "| above it | phases that allocated more than the plan's forecast |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workspace, name in COLUMNS.items():
        every = [row for row in rows if row["workspace"] == workspace]
        done = measured(every)
        near = sum(abs(worst(row, "allocated")) <= 1e6 for row in done)
        close = sum(abs(worst(row, "reserved")) <= 0.005 for row in done)
        told = [phase for row in done for phase in row["phases"] if phase["forecast"] is not None]
        more = sum(phase["allocated"][0] > phase["forecast"] for phase in told)
        capped = [row for row in done if row["budget"] is not None]
        lines.append(
            f"| {name} | {len(every)} | {len(done)} | {sum(map(is_exact, done))} | {near} | {close} | {len(capped)} "
            f"| {sum(map(is_above, capped))} | {more} of {len(told)} |"
        )
    return "\n".join(lines) + "\n\n"


def renewed(rows: list[dict[str, Any]]) -> str:
    """The summary of those rows that were measured with the code as it is."""
    new = [row for row in rows if "commit" in row]
    if len(new) == len(rows):
        return ""
    said = f"{len(new)} of {len(rows)} rows were measured since the code changed last:\n\n{summary(new)}"
    return f"{said}All rows, the older ones included:\n\n"


def tight(rows: list[dict[str, Any]]) -> str:
    """The plans that would not fit if convolutions held twice as much."""
    done = [row for row in rows if row["workspace"] == "twice" and row["level"] is None]
    short = [row for row in done if "engine" in row.get("refused", "") or row.get("ran_out") or row.get("failed")]
    above = [row for row in done if "phases" in row and is_above(row)]
    said = ", ".join(f"{row['model']} on a {row['card']} GB card" for row in short) or "none"
    over = ", ".join(f"{row['model']} on a {row['card']} GB card" for row in above) or "none"
    return (
        "## If convolutions held twice as much\n\n"
        f"A convolution ran out of memory, where cuDNN's other engines without a workspace would be taken: {said}.\n\n"
        f"More was reserved than the budget: {over}.\n\n"
    )


def tables(rows: list[dict[str, Any]]) -> str:
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        found = {(title(row), row["workspace"]): row for row in own}
        lines = [f"### {model}\n", f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
        for name in dict.fromkeys(map(title, own)):
            cells = [cell(found.get((name, workspace))) for workspace in COLUMNS]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "## Models\n\nA card's budget is 90 % of it.\n\n" + "\n".join(parts)


def published(calls: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Whole calls that others measured on cards."""
    lines = [
        "## Peaks that others published\n",
        "Allocated bytes of whole calls, everything on the card. The pages that these figures are from were not found",
        "again, so their conditions are not known; single passes, whose pages are known, are within 0.2 % (README).",
        "The last column is what torch's allocator gives here where convolutions have no workspace.\n",
        "| call | predicted | published | difference | highest phase | may differ | without workspaces |",
        "|---|---|---|---|---|---|---|",
    ]
    for call in calls:
        low, high = call["measured_gib"]
        span = f"{low} GiB" if low == high else f"{low} to {high} GiB"
        row = next(
            (row for row in rows if (row["model"], row["level"], row["workspace"]) == (call["model"], 0, "0")), {}
        )
        without = f"{row['allocated'] / 2**30:.3f} GiB" if row.get("allocated") else "–"
        lines.append(
            f"| {call['model']}, {call['request']} | {call['predicted_gib']} GiB | {span} ({call['year']}) "
            f"| {call['error']:+.1%} | {call['phase']} | {call['remark'] or '–'} | {without} |"
        )
    lines.append(
        "\nSDXL decodes in float32, and what was published lies between no workspace and the assumed one: for single "
        "precision, what is assumed is probably too much. CogVideoX's peak is at a pointwise operation of its decoder, "
        "so no workspace explains it; diffusers' decoder of 2024 may have been another. Both predictions are too high, "
        "so a plan made from them fits."
    )
    return "\n".join(lines) + "\n\n"


def main() -> int:
    facts = json.loads(FACTS.read_text())
    rows = facts["rows"]
    page = HEAD + f"torch {facts['torch']}, two steps, a model's usual size.\n\n" + renewed(rows) + summary(rows)
    page += tight(rows) + CAUSES.format(old=OLD) + "\n"
    page += published(json.loads(PUBLISHED.read_text()).get("calls", []), rows) + tables(rows)
    if "--check" in sys.argv:
        return int(PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
