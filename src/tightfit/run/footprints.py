"""A pipeline, a folder, a known model's name or one call of a module → its Footprint, measured on a pretend card."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply.fitting import fit
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.loading import quietly
from tightfit.errors import InputError
from tightfit.footprint import Footprint
from tightfit.measure.ledger import Ledger
from tightfit.measure.modules import find_components, inspect_pipeline
from tightfit.measure.shadow import mark_of, shadow_of
from tightfit.records import Accelerator, Request
from tightfit.run.aside import aside
from tightfit.run.predictions import find_subject, remembered
from tightfit.run.stage import Stage, roomy_card

__all__ = ["measure_footprint"]

Inputs = Mapping[str, Any] | Sequence[Any]
CARD = Accelerator(name="any card", kind="pretend", bytes=1)  # what is measured depends on no card's size and rates


def measure_footprint(
    subject: Any, request: Request | Mapping[str, Any] | None = None, *, inputs: Inputs | None = None
) -> Footprint:
    """What `subject` is made of and what it does, found out without its weights and without a card.

    `subject` is a diffusers pipeline, a folder (its configurations are read, its weights are not), a hub id, or a
    known model's name; then `request` says what is asked of it (default: a known model's usual request, else the
    pipeline's own defaults), and `inputs` names further arguments of its call, e.g. a control image. Where it starts
    from pictures and none are given, grey ones of the size that is asked for stand in.

    Or `subject` is a single module, or one of its methods (`vae.decode`); then `inputs` are the call's arguments, by
    position or by name: a tensor (of which only shape and dtype count, if it is large), a tuple of numbers for a
    shape in the module's own dtype, anything else as it is.

    Sizes are bytes, as the CUDA caching allocator would hand them out, without cuBLAS's workspace (`Card` has it).
    A denoiser's first two passes with each shape of input are followed; the others are taken to be like the second.
    The answer is kept on disk; of modules with code of their own, or with hooks, it is not.

    Raises InputError for what cannot be measured, ModelError for a broken folder, RequestError for what the pipeline
    does not take, PlanError for a pipeline that follows a plan (undo first) and for weights in a format of their own.
    """
    asked = request if isinstance(request, Request) else Request.from_mapping(request or {})
    if isinstance(subject, str | Path):
        model, mark = find_subject(str(subject))
        return _kept(mark, asked, inputs, model)
    module, method = (subject.__self__, subject.__name__) if inspect.ismethod(subject) else (subject, "forward")
    if isinstance(module, nn.Module):
        if request is not None or inputs is None:
            raise InputError(
                f"a single {type(module).__name__} has no request: give inputs, e.g. inputs=[(1, 4, 64, 64)]",
                kind=type(module).__name__,
            )
        return aside(_measure_module, shadow_of(module), method, inputs)
    find_components(subject)  # PlanError where it has none
    return _kept(mark_of(subject), asked, inputs, subject)


def _kept(mark: str, asked: Request, inputs: Inputs | None, model: Any) -> Footprint:
    """From the cache, where all that the answer depends on has a mark."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(f"a pipeline's inputs go by name, not as {type(inputs).__name__}", kind=type(inputs).__name__)

    def measure() -> Footprint:
        known = isinstance(model, str | ModelFolder)
        return aside(_measure_call, model if known else shadow_of(model), asked, inputs or {})

    if inputs or not mark:
        return measure()
    return remembered(Footprint, {"model": mark, "request": asked.to_mapping()}, measure)


def _measure_call(model: Any, asked: Request, inputs: Mapping[str, Any]) -> Footprint:
    with roomy_card(CARD) as card, ExitStack() as undo:
        stage = Stage(model, card, {"level": 0}, asked)
        ledger = Ledger(card)
        ledger.follow(stage.components, undo)
        stage.play(inputs)
        made = inspect_pipeline(stage.pipe)
        return made.model_copy(update={"request": stage.request, "phases": ledger.phases()})


def _measure_module(double: nn.Module, method: str, inputs: Inputs) -> Footprint:
    dtype = next((p.dtype for p in double.parameters() if p.is_floating_point()), torch.float32)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    with roomy_card(CARD) as card, ExitStack() as undo, torch.no_grad(), quietly():
        fit(double, level=0, device="pretend:0")
        given = [_placed(value, dtype) for value in args]
        named = {name: _placed(value, dtype) for name, value in kwargs.items()}
        ledger = Ledger(card)
        ledger.follow({"model": double}, undo)
        (double if method == "forward" else getattr(double, method))(*given, **named)
        return inspect_pipeline(double).model_copy(update={"phases": ledger.phases()})


def _placed(value: Any, dtype: torch.dtype) -> Any:
    """`value` on the pretend card, in the place of an argument."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, device="pretend:0") if value.is_meta else value.to("pretend:0")
    if isinstance(value, tuple) and value and all(type(length) is int for length in value):
        return torch.zeros(value, dtype=dtype, device="pretend:0")
    return value
