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
HEAD = """# Predicted and measured memory peaks

This page answers: how close are predicted peaks to those of torch's own allocator?

`bench/peaks_cuda.py` calls known models at full size on a stub of the CUDA runtime. torch's CUDA build, caching
allocator, streams and memory limits are the real ones; there is no card. Weights are memory that is never touched, and
only small tensors are computed. This compares the prediction with tensor layouts, the order of allocations, the
allocator and its limits. It does not compare cuDNN or a real card: the size of a convolution's workspace is set by the
stub to as many bytes as are assumed, none, or twice as many.

A difference is prediction minus torch, the largest of a call's three phases. "Exact": allocated and reserved bytes are
equal to the byte in every phase. For budgets, the cap was kept unless a cell says otherwise.

"""
CAUSES = """## Known differences

- Not simulated: the buffer through which torch splits a sum with few outputs among a card's multiprocessors
  (`setReduceConfig` in Reduce.cuh; its size depends on their number), and the allocations of cuFFT and of cub's
  sorting.
- Decoding videos near the cap, where the allocator releases its cache repeatedly: reserved bytes differ by up to 7 %.
  CogVideoX within 5.4 GB allocates 213 MB more than the simulated call, and less than the plan's forecast.
- Of several free blocks of the same size, torch 2.11 takes the one with the lowest address, which the driver chooses.
  With 2.11, reserved bytes can therefore differ, and allocated bytes by up to 1 MiB. This page is for the version named
  above.
- With another workspace than the assumed one, peaks differ by the bytes of convolutions' workspaces. The last two
  columns exist to show that.
- Rows with {old} were measured with an older version of the code. There, outputs under a budget were first copied on
  the card (up to 15 MB in each phase), values that a pipeline reads back were undefined (Wan's text encoder made a mask
  of 30 MB from one; flux.2-dev and sd-1.5 could not run), some buffers of kernels beside their outputs were missing,
  and torch's choice among free blocks of the same size was not modelled (up to 5 % of reserved bytes).
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
    said = f"{len(new)} of {len(rows)} rows were measured since the last change of the code:\n\n{summary(new)}"
    return f"{said}All rows, including older ones:\n\n"


def tight(rows: list[dict[str, Any]]) -> str:
    """The plans that would not fit if convolutions held twice as much."""
    done = [row for row in rows if row["workspace"] == "twice" and row["level"] is None]
    short = [row for row in done if "engine" in row.get("refused", "") or row.get("ran_out") or row.get("failed")]
    above = [row for row in done if "phases" in row and is_above(row)]
    said = ", ".join(f"{row['model']} on a {row['card']} GB card" for row in short) or "none"
    over = ", ".join(f"{row['model']} on a {row['card']} GB card" for row in above) or "none"
    return (
        "## Workspaces of twice the assumed size\n\n"
        f"A convolution ran out of memory, where cuDNN would use an engine without a workspace: {said}.\n\n"
        f"More than the budget was reserved: {over}.\n\n"
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
    return "## Models\n\nThe budget of a card is 90 % of its memory.\n\n" + "\n".join(parts)


def published(calls: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Whole calls that others measured on cards."""
    lines = [
        "## Published peaks\n",
        "Allocated bytes of whole calls, everything on the card. The pages that these figures are from were not found",
        "again, so their conditions are unknown. Single passes, whose pages are known, are within 0.2 %",
        "([prediction accuracy](prediction-accuracy.md)). The last column is the peak of torch's allocator on the",
        "stub, with no workspace for convolutions.\n",
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
        "\nSDXL decodes in float32. Its published peak is between the one without a workspace and the one with the "
        "assumed workspace, so the assumption is probably too large for single precision. CogVideoX's peak is at a "
        "pointwise operation of its decoder, so a workspace does not explain it; the decoder of diffusers may have "
        "been different in 2024. Both predictions are too high, so a plan made from them fits."
    )
    return "\n".join(lines) + "\n\n"


def main() -> int:
    facts = json.loads(FACTS.read_text())
    rows = facts["rows"]
    page = HEAD + f"torch {facts['torch']}, two steps, each model's usual size.\n\n" + renewed(rows) + summary(rows)
    page += tight(rows) + CAUSES.format(old=OLD) + "\n"
    page += published(json.loads(PUBLISHED.read_text()).get("calls", []), rows) + tables(rows)
    if "--check" in sys.argv:
        return int(PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
