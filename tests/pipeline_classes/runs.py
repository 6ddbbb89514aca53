"""Calls of small pipelines on a simulated card with numbers: untouched, and as a level or a budget says."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

import tightfit
from inspection import Imprint, assert_same, imprint
from simulator.conftest import ACCELERATOR
from tightfit import BudgetTooSmall
from tightfit.apply.fitting import Fitted
from tightfit.measure.modules import find_components, weight_tensors
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import PIXELS, TinyCase

MIB = 2**20
WEIGHTS = 240 * MIB  # of a pipeline whose 40 % are more than the least budget, with its margin of 50 MiB
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
def card_of(size: int) -> Iterator[SimulatedCard]:
    card = SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": size}), Host(), values="real")
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
        before, written = imprint(pipe), set[int]()
        self.wanted, self.written = dict[int, Numbers](), dict[int, dict[int, torch.Tensor]]()
        for height in (PIXELS, OTHER):
            self.wanted[height] = numbers_of(pipe(**self.case.call(height)))
            self.called = imprint(pipe)
            written |= _written(before, self.called)
            self.written[height] = {index: self.called.values[index].cpu() for index in written}


def _written(before: Imprint, after: Imprint) -> set[int]:
    """Which weights a call replaced or wrote into, by their place among all."""
    replaced = {
        index for index, pair in enumerate(zip(before.tensors, after.tensors, strict=True)) if len(set(pair)) > 1
    }
    values = enumerate(zip(before.values, after.values, strict=True))
    return replaced | {index for index, (old, new) in values if not torch.equal(old, new)}


def cell_of(work: Any) -> float | str:
    try:
        found: float | str = work()
        return found
    except Exception as error:
        where = [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]} ({where[-1]})"


def run_fitted(untouched: Untouched, **fields: Any) -> tuple[list[tuple[int, Numbers]], bool]:
    """What two calls alike and one of another size give, and whether numbers may differ; then `undo` leaves no trace.

    Each time of a new pipeline: some keep tables on the device of their last call, and each card here is another
    device. The other size may want more than the least budget for this one.
    """
    case, pipe, lossy = untouched.case, made(untouched.case, untouched.scale), False
    found, before = list[tuple[int, Numbers]](), imprint(pipe)
    fitted: Fitted = tightfit.fit(pipe, device="simulated:0", **fields)
    try:
        for height in (PIXELS, PIXELS, OTHER):
            try:
                found.append((height, numbers_of(pipe(**case.call(height)))))
                lossy |= not fitted.report().lossless
            except BudgetTooSmall:
                if height == PIXELS:
                    raise
    finally:
        fitted.undo()
    _assert_undone(before, untouched, found[-1][0], imprint(pipe), lossy)
    return found, lossy


def _assert_undone(before: Imprint, untouched: Untouched, height: int, after: Imprint, lossy: bool) -> None:
    """All as `before`, but what calls of the untouched pipeline, the last of `height`, leave behind and write."""
    called, written = untouched.called, untouched.written[height]
    kept = zip(before.attributes, after.attributes, called.attributes, strict=True)
    assert all(old <= now <= new for old, now, new in kept)
    expected = replace(before, attributes=after.attributes, hooks=called.hooks)
    assert_same(_without(written, expected), _without(written, after))
    for index, value in written.items():
        (_, _, *form), (_, _, *now) = before.tensors[index], after.tensors[index]
        assert now == form, f"{before.tensors[index][0]}: {form}, and {now} after undo"
        assert lossy or difference([after.values[index].double()], [value.double()]) <= CLOSE, before.tensors[index][0]


def _without(written: Collection[int], whole: Imprint) -> Imprint:
    """All but those weights."""
    tensors = [tensor for index, tensor in enumerate(whole.tensors) if index not in written]
    values = [value for index, value in enumerate(whole.values) if index not in written]
    return replace(whole, tensors=tuple(tensors), values=tuple(values))
