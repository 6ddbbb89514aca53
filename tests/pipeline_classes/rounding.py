"""Rounding told from mistakes: a pipeline in float64, and how far from that it is in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pipeline_classes.runs import Untouched, card_of, difference, run_fitted, scale_of
from tightfit.measure.modules import find_components
from tiny_pipelines import TinyCase


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


def times_as_far(case: TinyCase, sizes: Iterable[int]) -> float:
    """How far calls within budgets of these `sizes` are from what the pipeline gives in float64, with the same noise.

    As a multiple of how far the untouched pipeline is from that; the most of all.
    """
    scale = scale_of(case)
    untouched = Untouched(case, scale)
    with _Float32Noise():
        exact = Untouched(in_double(case), scale)
    own = {height: difference(untouched.wanted[height], wanted) for height, wanted in exact.wanted.items()}
    ratios = list[float]()
    for size in sizes:
        with card_of(size):
            found, _ = run_fitted(untouched, budget=size)
        ratios += [difference(numbers, exact.wanted[height]) / own[height] for height, numbers in found]
    return max(ratios)


DRAWS = (torch.randn, torch.rand, torch.randn_like, torch.rand_like)


class _Float32Noise(TorchFunctionMode):
    """What is drawn in float64 are the numbers that are drawn in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        like = args[0].dtype if func in (torch.randn_like, torch.rand_like) else None
        if func in DRAWS and kwargs.get("dtype", like) is torch.float64:
            return func(*args, **kwargs | {"dtype": torch.float32}).double()
        return func(*args, **kwargs)
