"""bench/results/planning.json → docs/planning.md: how long plans take to make.

`python tools/make_planning.py`; the results are written by `python bench/planning.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "planning.md"
FACTS = ROOT / "bench" / "results" / "planning.json"
AIMS = {"first": (5, 15), "exporting": (15, 40), "known": (1, 1)}  # seconds, for pictures and for clips
HEAD = """# How long planning takes

This page answers: how many seconds does a plan take, on the first call of a model and later?

The table has the wall-clock seconds of one plan in a process of its own, on {cpu}, {cores} cores, torch {torch}, with
nothing else running. This shared machine's speed varies: the same plans have taken twice as long on other days.
Importing torch, diffusers and transformers is not counted. Budgets are shares of the bytes of all
weights, with the rates of an RTX 4090. *r*: refused, with the budget that would be enough.

- **first**: nothing about the model is known except what the package contains (exported graphs of the catalog's
  autoencoders).
- **exporting**: as *first*, but without those graphs, as with another version of a library. Most of this column was
  measured beside some other work.
- **known**: the call was measured before. All of the command's own time is counted, and torch is not imported.

On Linux, forked copies of the process help with a first plan where each has 512 MiB of free RAM. They use no card, and
end with the measurement.

Targets: {aims}.
Cells above the target are in **bold**: {missed} of {all}. Models marked * are not in the catalog and are planned from
their folders: their target is that of *exporting*. `tools/make_planning.py` makes this page from the results of
`bench/planning.py`.

"""


def page() -> str:
    facts = json.loads(FACTS.read_text())
    rows: list[dict[str, Any]] = facts["rows"]
    shares = sorted({row["share"] for row in rows})
    columns = [(way, share) for way in AIMS for share in shares]
    found = {(row["model"], row["way"], row["share"]): row for row in rows}
    lines = [
        HEAD.format(
            **facts["machine"],
            aims="; ".join(f"{way} {image} s, {video} s for a video" for way, (image, video) in AIMS.items()),
            missed=sum(_is_late(row) for row in rows),
            all=len(rows),
        ),
        f"| model | {' | '.join(f'{way}, {share:.0%}' for way, share in columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        name = model if found[model, *columns[0]]["listed"] else f"{model}*"
        lines.append(f"| {name} | {' | '.join(_cells(model, columns, found))} |")
    return "\n".join(lines) + "\n"


def _cells(model: str, columns: Iterable[tuple[str, float]], found: dict[Any, dict[str, Any]]) -> Iterable[str]:
    for way, share in columns:
        row = found.get((model, way, share))
        if row is None:
            yield ""
        elif "failed" in row:
            yield f"**{row['failed']}**"
        else:
            number = f"{row['wall']:.1f}"
            yield f"{f'**{number}**' if _is_late(row) else number}{' *r*' if row['refused'] else ''}"


def _is_late(row: dict[str, Any]) -> bool:
    way = "exporting" if row["way"] == "first" and not row["listed"] else row["way"]
    return "failed" in row or row["wall"] > AIMS[way][row["clip"]]


if __name__ == "__main__":
    PAGE.write_text(page())
