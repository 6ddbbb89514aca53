"""Pipeline classes, each within levels and budgets on a simulated card with numbers, beside the untouched pipeline.

`python -m pipeline_classes.proof --results FILE [CLASS …]` writes a line for each class, without those that FILE has.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

import tightfit
from pipeline_classes import cases
from pipeline_classes.rounding import in_double, times_as_far
from pipeline_classes.runs import CARD, CLOSE, MIB, Untouched, card_of, cell_of, difference, made, run_fitted, scale_of
from tightfit import BudgetTooSmall
from tightfit.apply.fitting import Fitted
from tiny_pipelines import PIXELS, TinyCase

SHARES = (0.75, 0.4)  # of the peak of level 0


def prove(
    case: TinyCase, scale: int | None = None, levels: Iterable[int] = range(4), shares: Sequence[float] = SHARES
) -> dict[str, Any]:
    """What became of each level and each budget of one class: the largest difference of its calls, or why not.

    Budgets are `shares` of the peak at level 0, which must be among the levels then, and the least. Levels above 0 do
    the same to a pipeline of a quarter of the weights, in less time.
    """
    began = time.monotonic()
    scale = scale_of(case) if scale is None else scale
    whole = Untouched(case, scale)
    smaller = Untouched(case, max(scale // 2, 1)) if any(levels) else whole
    row: dict[str, Any] = {"name": case.name, "weights": whole.weights, "on_card": whole.on_card}
    row |= {"levels": {}, "budgets": {}}
    for level in levels:
        with card_of(2**40) as card:
            row["levels"][str(level)] = cell_of(lambda n=level: _calls(smaller if n else whole, level=n))
            if level == 0:
                row["peak"] = card.held.peak
    sizes = _sizes(row["peak"], shares) if shares else {}
    with card_of(2**40):
        least = cell_of(lambda: _least(case, scale))
    if isinstance(least, str):
        return row | {"budgets": dict.fromkeys((*sizes, "least"), least), "seconds": round(time.monotonic() - began)}
    sizes["least"] = int(least)
    for name, size in sizes.items():
        if name != "least" and size < least:
            row["budgets"][name] = f"needs {least / row['peak']:.0%}"
            continue
        with card_of(size) as card:
            row["budgets"][name] = cell_of(lambda size=size: _calls(whole, budget=size))
            if card.held.peak > size:
                row["budgets"][name] = f"held {card.held.peak} of {size} bytes"
    row["least"] = least
    return row | {"seconds": round(time.monotonic() - began)}


def row_of(case: TinyCase) -> dict[str, Any]:
    """What `prove` gives; where a cell is above CLOSE, two more numbers that tell rounding from mistakes.

    "double" is the largest of all cells of the pipeline in float64; "farther" is `times_as_far` of such budgets.
    Neither excuses a cell. Where the untouched pipeline fails in the same way on a simulated card, there is nothing but
    "untouched", the error.
    """
    untouched = cell_of(lambda: _on_card(case))
    if isinstance(untouched, str) and untouched == cell_of(lambda: _at_level_0(case)):
        return {"name": case.name, "untouched": untouched}
    row = prove(case)
    if any(map(_is_far, cells_of(row))):
        row["double"] = cell_of(lambda: _largest(prove(in_double(case), max(round(scale_of(case) / math.sqrt(2)), 1))))
    sizes = {**_sizes(row["peak"], SHARES), "least": row.get("least")}
    if far := [sizes[name] for name, cell in row["budgets"].items() if _is_far(cell)]:
        row["farther"] = cell_of(lambda: times_as_far(case, far))
    return row


def _sizes(peak: int, shares: Sequence[float]) -> dict[str, int]:
    """Bytes of budgets that are shares of a peak, by what they are called."""
    return {f"{share:.0%}": int(share * peak) for share in shares}


def _is_far(cell: float | str) -> bool:
    return isinstance(cell, float) and cell > CLOSE


def cells_of(row: dict[str, Any]) -> list[float | str]:
    return [*row.get("levels", {}).values(), *row.get("budgets", {}).values()]


def _largest(row: dict[str, Any]) -> float | str:
    """Difference of a class; instead of it, what went wrong in a cell."""
    cells = [cell for cell in cells_of(row) if not str(cell).startswith(("lossy: ", "needs "))]
    wrong = [cell for cell in cells if isinstance(cell, str)]
    return wrong[0] if wrong else max(cells)


def _on_card(case: TinyCase) -> float:
    """Calls an untouched pipeline whose modules are all on a simulated card."""
    with card_of(2**40):
        made(case, 1).to(CARD)(**case.call(PIXELS))
    return 0.0


def _at_level_0(case: TinyCase) -> float:
    with card_of(2**40):
        pipe = made(case, 1)
        tightfit.fit(pipe, device="simulated:0", level=0)
        pipe(**case.call(PIXELS))
    return 0.0


def _calls(untouched: Untouched, **fields: Any) -> float | str:
    """The largest difference of the calls of `run_fitted`; that too, where reports say that numbers may differ."""
    found, lossy = run_fitted(untouched, **fields)
    worst = max(difference(numbers, untouched.wanted[height]) for height, numbers in found)
    return f"lossy: {worst:.0e}" if lossy and worst > CLOSE else worst


def _least(case: TinyCase, scale: int) -> int:
    """Bytes that a plan names as enough, at once or, where none can be made before the first call, at that or after."""
    pipe = made(case, scale)
    try:
        tightfit.fit(pipe, device="simulated:0", budget=1, example=case.call(PIXELS)).undo()
    except BudgetTooSmall as error:
        if enough := _enough(error, 0):
            return enough
    size = 64 * MIB
    while True:
        pipe = made(case, scale)
        fitted: Fitted = tightfit.fit(pipe, device="simulated:0", budget=size)
        try:
            pipe(**case.call(PIXELS))
            pipe(**case.call(PIXELS))
        except BudgetTooSmall as error:
            size = _enough(error, 2 * size)
        else:
            return size
        finally:
            fitted.undo()


def _enough(error: BudgetTooSmall, otherwise: int) -> int:
    named: Any = error.facts.get("needed_bytes", otherwise)
    return int(named)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--results", type=Path, required=True)
    options.add_argument("classes", nargs="*")
    given = options.parse_args()
    known = (
        [json.loads(line)["name"] for line in given.results.read_text().splitlines()] if given.results.exists() else []
    )
    for name, case in cases().items():
        if name in known or (given.classes and name not in given.classes):
            continue
        try:
            row = row_of(case)
        except Exception as error:
            row = {"name": name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        row |= {"diffusers": diffusers.__version__, "torch": torch.__version__}
        with given.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
