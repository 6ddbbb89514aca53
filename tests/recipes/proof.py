"""Pipeline classes, each within levels and budgets on a simulated card with numbers, beside the untouched pipeline.

`python -m recipes.proof --results FILE [CLASS …]` writes one line for each class, and leaves out those that FILE has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

import tightfit
from inspection import Imprint, assert_same, imprint
from pretend.conftest import ACCELERATOR
from recipes import cases
from tightfit import BudgetTooSmall
from tightfit.apply.fitting import Fitted
from tightfit.measure.modules import find_components, weight_tensors
from tightfit.pretend.backend import use_cards
from tightfit.pretend.card import Card
from tightfit.pretend.clock import Host
from tiny_pipelines import PIXELS, TinyCase

MIB = 2**20
WEIGHTS = 240 * MIB  # of a pipeline whose 40 % are more than the least budget, with its margin of 50 MiB
SHARES = (0.75, 0.4)  # of the peak of level 0
OTHER = PIXELS + PIXELS // 2  # pixels, of a call of another size
CARD = "privateuseone:0"
CLOSE = 1e-5  # of the largest number: sums in another order, over some steps

Numbers = list[torch.Tensor]


def numbers_of(output: Any) -> Numbers:
    """All tensors, arrays and pictures in what a pipeline returns."""
    plain = isinstance(output, torch.Tensor | dict) or not hasattr(output, "__dict__")
    whole = output if plain else vars(output)
    found = [_numbers(value) for value in tree_leaves(whole)]
    return [each.double() for each in found if each is not None and each.numel()]


def _numbers(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.astype(np.float64))
    return torch.from_numpy(np.array(value, dtype=np.float64)) if isinstance(value, Image.Image) else None


def difference(found: Numbers, wanted: Numbers) -> float:
    """Of the numbers that differ most, relative to the largest."""
    if [each.shape for each in found] != [each.shape for each in wanted] or not found:
        return math.inf
    return max(float((a - b).abs().max() / max(b.abs().max(), 1e-9)) for a, b in zip(found, wanted, strict=True))


def made(case: TinyCase, scale: int) -> Any:
    pipe: Any = case.make(scale)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def scale_of(case: TinyCase) -> int:
    """At which a pipeline's weights take about WEIGHTS; 1 where they do not grow."""
    sizes = [_weights(case.make(scale)) for scale in (2, 4)]
    return max(round(4 * math.sqrt(WEIGHTS / sizes[1])), 1) if sizes[1] > sizes[0] else 1


def _weights(pipe: Any) -> int:
    parts = find_components(pipe).values()
    return sum({id(each): each.nbytes for part in parts for each in weight_tensors(part)}.values())


@contextlib.contextmanager
def card_of(size: int) -> Iterator[Card]:
    card = Card(0, ACCELERATOR.model_copy(update={"bytes": size}), Host(), values="real")
    use_cards([card])
    try:
        yield card
    finally:
        use_cards(())


class Untouched:
    """What calls of a case's pipeline of one size give without tightfit, all of it on a card like that of `prove`.

    Kernels of another device round in another way. On the CPU, where the pipeline cannot be on one card as a whole.
    """

    def __init__(self, case: TinyCase, scale: int) -> None:
        self.case, self.scale = case, scale
        pipe = made(case, scale)
        self.weights = _weights(pipe)
        self.on_card = True
        try:
            with card_of(2**40):
                self._call(pipe.to(CARD))
        except Exception:  # of pipelines that mix devices: of any kind
            self.on_card = False
            self._call(made(case, scale))

    def _call(self, pipe: Any) -> None:
        self.wanted = {height: numbers_of(pipe(**self.case.call(height))) for height in (PIXELS, OTHER)}
        self.called = imprint(pipe)


def prove(
    case: TinyCase, scale: int | None = None, levels: Iterable[int] = range(4), shares: Iterable[float] = SHARES
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
            row["levels"][str(level)] = _cell(lambda n=level: _calls(smaller if n else whole, level=n))
            if level == 0:
                row["peak"] = card.held.peak
    sizes = {f"{share:.0%}": int(share * row["peak"]) for share in shares}
    with card_of(2**40):
        least = _cell(lambda: _least(case, scale))
    if isinstance(least, str):
        return row | {"budgets": dict.fromkeys((*sizes, "least"), least), "seconds": round(time.monotonic() - began)}
    sizes["least"] = int(least)
    for name, size in sizes.items():
        if name != "least" and size < least:
            row["budgets"][name] = f"needs {least / row['peak']:.0%}"
            continue
        with card_of(size) as card:
            row["budgets"][name] = _cell(lambda size=size: _calls(whole, budget=size))
            if card.held.peak > size:
                row["budgets"][name] = f"held {card.held.peak} of {size} bytes"
    row["least"] = least
    return row | {"seconds": round(time.monotonic() - began)}


def row_of(case: TinyCase) -> dict[str, Any]:
    """What `prove` gives; where a cell is above CLOSE, "double" is the largest of all cells of the pipeline in float64.

    It does not excuse the cell, but tells rounding from mistakes: random weights amplify a float32's last digit.
    Where the untouched pipeline fails in the same way on a simulated card, there is nothing but "untouched", the error.
    """
    untouched = _cell(lambda: _on_card(case))
    if isinstance(untouched, str) and untouched == _cell(lambda: _at_level_0(case)):
        return {"name": case.name, "untouched": untouched}
    row = prove(case)
    if any(isinstance(cell, float) and cell > CLOSE for cell in cells_of(row)):
        row["double"] = _cell(lambda: _largest(prove(in_double(case), max(round(scale_of(case) / math.sqrt(2)), 1))))
    return row


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
        tightfit.fit(pipe, device="pretend:0", level=0)
        pipe(**case.call(PIXELS))
    return 0.0


def in_double(case: TinyCase) -> TinyCase:
    """The same in float64, but for modules that diffusers keeps in float32: rounding goes, and a mistake stays."""

    def make(*scale: int) -> Any:
        pipe = case.make(*scale)
        for component in find_components(pipe).values():
            component.double()
            narrow = getattr(component, "_keep_in_fp32_modules", None) or ()
            for path, part in component.named_modules():
                if not set(narrow).isdisjoint(path.split(".")):
                    part.float()
        return pipe

    return replace(case, make=make)


def _cell(work: Any) -> float | str:
    try:
        found: float | str = work()
        return found
    except Exception as error:
        where = [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]} ({where[-1]})"


def _calls(untouched: Untouched, **fields: Any) -> float | str:
    """The largest difference of two calls alike and one of another size; then `undo` leaves what was there.

    Where reports say that numbers may differ, as with blended tiles, and they do, it says so. Each time of a new
    pipeline: some keep tables on the device of their last call, and each card here is another device.
    """
    case, pipe, worst, lossy = untouched.case, made(untouched.case, untouched.scale), 0.0, False
    before = imprint(pipe)
    fitted: Fitted = tightfit.fit(pipe, device="pretend:0", **fields)
    try:
        for height in (PIXELS, PIXELS, OTHER):
            try:
                worst = max(worst, difference(numbers_of(pipe(**case.call(height))), untouched.wanted[height]))
                lossy |= not fitted.report().lossless
            except BudgetTooSmall:
                if height == PIXELS:  # the other size may want more than the least for this one
                    raise
    finally:
        fitted.undo()
    _assert_undone(before, untouched.called, imprint(pipe))
    return f"lossy: {worst:.0e}" if lossy and worst > CLOSE else worst


def _assert_undone(before: Imprint, called: Imprint, after: Imprint) -> None:
    """All as `before`, but attributes and hooks that calls of the untouched pipeline leave behind."""
    kept = zip(before.attributes, after.attributes, called.attributes, strict=True)
    assert all(old <= now <= new for old, now, new in kept)
    assert_same(replace(before, attributes=after.attributes, hooks=called.hooks), after)


def _least(case: TinyCase, scale: int) -> int:
    """Bytes that a plan names as enough, at once or, where none can be made before the first call, at that or after."""
    pipe = made(case, scale)
    try:
        tightfit.fit(pipe, device="pretend:0", budget=1, example=case.call(PIXELS)).undo()
    except BudgetTooSmall as error:
        return _enough(error, 0)
    size = 64 * MIB
    while True:
        pipe = made(case, scale)
        fitted: Fitted = tightfit.fit(pipe, device="pretend:0", budget=size)
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
