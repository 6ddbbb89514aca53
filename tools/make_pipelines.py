"""bench/results/pipelines.jsonl → docs/pipelines.md: every pipeline class of the installed diffusers.

`python tools/make_pipelines.py`; the results are written by `python -m pipeline_classes.proof` (see `make test-slow`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import diffusers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from pipeline_classes import cases, left_out  # noqa: E402
from pipeline_classes.proof import CLOSE, cells_of  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "pipelines.jsonl"
PAGE = ROOT / "docs" / "pipelines.md"
COLUMNS = ("level 0", "level 1", "level 2", "level 3", "75%", "40%", "least", "in float64", "times as far")
HEAD = """# Pipeline classes

This page answers: which pipeline classes of diffusers run under tightfit, and how close are their results to those of
the untouched pipeline?

diffusers {version} has {total} classes whose name ends in Pipeline. For {tried} of them there is a small pipeline of
random weights here, and {run} have been run. {failed} have a cell that failed.

**How a class is run.** On a simulated card that computes: at levels 0 to 3, with budgets of 75 and 40 % of the peak at
level 0, and with the smallest budget that a plan names as enough ("least"). Each run has two equal calls, one call of
another size, and `undo`. Levels 1 to 3 use a quarter of the weights or all of them.

**What a cell has.** The largest difference from the untouched pipeline, relative to the largest number. 0: bit-equal.
More than {close:.0e} counts as failed. The untouched pipeline runs on a simulated card of the same kind; for {on_cpu}
classes it ran on the CPU, in an older run or because they mix devices.

- *in float64*: for a class with a cell above that bound, the largest of all cells with the pipeline in float64. A
  mistake is as large there as before, and rounding is about 1e-15.
- *times as far*: how far such cells are from the float64 result with the same noise, divided by how far the untouched
  pipeline is from it. Random weights amplify a last digit.
- *needs*: the smallest budget is more than that share, because a plan keeps 50 MiB of a card free, or because
  activations take most of the memory.
- *lossy*: this level blends tiles of large images, and reports it.

`tools/make_pipelines.py` makes this page from the results of `python -m pipeline_classes.proof`.

"""

ALIKE = """On a simulated card, these raise the same error without tightfit and with all modules on the card. torch
supports flex attention only on CPUs and real cards."""


def page() -> str:
    rows = {row["name"]: row for row in map(json.loads, RESULTS.read_text().splitlines())} if RESULTS.exists() else {}
    alike = {name: rows.pop(name)["untouched"] for name in sorted(rows) if "untouched" in rows[name]}
    known, reasons = cases(), left_out()
    classes = sorted(name for name in dir(diffusers) if name.endswith("Pipeline"))
    made = {f"{name}Pipeline" for name in known}
    numbers = {
        "version": diffusers.__version__,
        "total": len(classes),
        "tried": len(known),
        "run": len(rows),
        "failed": sum(_failed(row) for row in rows.values()),
        "on_cpu": sum("failed" not in row and not row.get("on_card") for row in rows.values()),
        "close": CLOSE,
    }
    lines = [HEAD.format(**numbers), f"| class | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    lines += [f"| {name} | {' | '.join(_cells(rows.get(name)))} |" for name in sorted(known) if name not in alike]
    lines += ["", "## Fail without tightfit, too", "", ALIKE, "", "| class | error |", "|---|---|"]
    lines += [f"| {name} | {error.replace('|', ' ')} |" for name, error in alike.items()]
    lines += ["", "## No test pipeline", "", "| class | why |", "|---|---|"]
    lines += [f"| {name} | {reasons.get(name, 'no recipe yet')} |" for name in classes if name not in made]
    return "\n".join(lines) + "\n"


def _failed(row: dict[str, Any]) -> bool:
    """Levels may be lossy where they say so; plans within a budget never are."""
    levels, budgets = (row.get(part, {}).values() for part in ("levels", "budgets"))
    right = [_is_right(cell, "lossy: ") for cell in levels] + [_is_right(cell, "needs ") for cell in budgets]
    return "failed" in row or not all(right)


def _is_right(cell: float | str, reason: str) -> bool:
    return cell.startswith(reason) if isinstance(cell, str) else cell <= CLOSE


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["not run yet"] + [""] * (len(COLUMNS) - 1)
    if "failed" in row:
        return [row["failed"].replace("|", " ")] + [""] * (len(COLUMNS) - 1)
    farther = row.get("farther", "")
    farther = f"{farther:.1f}" if isinstance(farther, float) else farther.replace("|", " ")
    return [*map(_shown, cells_of(row)), _shown(row.get("double", "")), farther]


def _shown(cell: float | str) -> str:
    if isinstance(cell, str):
        return cell.replace("|", " ")
    return "0" if cell == 0 else f"{cell:.1e}"


if __name__ == "__main__":
    PAGE.write_text(page())
