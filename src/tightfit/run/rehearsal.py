"""A model's call on a pretend card, without weights and without hardware: what would happen, before it does.

The unmodified pipeline follows the plan by the same engine as anywhere else. Its denoiser works twice for every
shape of input it is given; from then on it only lets the time pass that its second pass took.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from tightfit.apply.fitting import Fitted, fit
from tightfit.catalog.known import known_card, known_model
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.loading import quietly
from tightfit.checkpoint.shapes import build_folder
from tightfit.measure.building import build_known
from tightfit.measure.modules import find_components, find_role
from tightfit.pretend.allocator import CardFull
from tightfit.pretend.backend import use_cards
from tightfit.pretend.card import Card
from tightfit.pretend.clock import Host
from tightfit.pretend.history import replay
from tightfit.pretend.storage import settle
from tightfit.records import Prediction, Request
from tightfit.run.job import stored_dtype
from tightfit.run.request import NAMES, Prompt, call_arguments

__all__ = ["CONTEXT", "rehearse"]

CONTEXT = 512 * 2**20  # bytes of a card that CUDA's context and the driver keep (an assumption)
ROOM = 2**60  # bytes: the rehearsal itself never runs out


def rehearse(
    model: str | ModelFolder, card_name: str, choices: dict[str, Any], asked: Request, *, title: str | None = None
) -> Prediction:
    """What `model`, a known one's name or a checked folder, would do on a known card, under `choices` of Plan fields.

    What `asked` leaves open is a known model's usual request, or the pipeline's own defaults. The prediction calls
    the model `title`. InputError for unknown names, ModelError for a folder that makes no pipeline, RequestError and
    PlanError for what is illegal.
    """
    accelerator = known_card(card_name)
    card = Card(0, accelerator.model_copy(update={"bytes": ROOM}), Host())
    use_cards([card])
    pipe, usual = _build(model)
    pipe.set_progress_bar_config(disable=True)
    request = Request(**_usual(pipe, usual) | {name: value for name, value in asked if value is not None})
    fitted = fit(pipe, plan=choices, request=request, device="pretend:0")
    for name, part in find_components(pipe).items():
        if find_role(name, part) == "denoiser":
            part.forward = _remembering(part, fitted, card)
    arguments = call_arguments(pipe, Prompt("a prompt", seed=0), request)
    with torch.no_grad(), quietly():
        pipe(**arguments, output_type="pt")
    capacity = max(accelerator.bytes - CONTEXT, 1)
    trace = fitted.report().trace
    return Prediction(
        model=title or (model if isinstance(model, str) else model.path.name),
        card=card_name,
        capacity=capacity,
        fits=_fits(card, capacity),
        plan=fitted.plan.model_copy(update={"device": "cuda:0"}),
        trace=trace.model_copy(update={"device": card_name, "rss_peak_bytes": 0}),
    )


def _build(model: str | ModelFolder) -> tuple[Any, Request]:
    """The pipeline without weights, and what it is usually asked for."""
    if isinstance(model, ModelFolder):
        return build_folder(model, getattr(torch, stored_dtype(model))), Request()
    known = known_model(model)
    return build_known(known), known.request


def _usual(pipe: Any, request: Request) -> dict[str, Any]:
    """The parts of a model's usual request that its pipeline takes."""
    taken = inspect.signature(type(pipe).__call__).parameters
    return {name: value for name, value in request if value is not None and NAMES[name] in taken}


def _fits(card: Card, capacity: int) -> bool:
    """Whether a card with `capacity` bytes would do: at once, or by giving its cache back now and then."""
    if card.allocator.reserved.peak <= capacity:
        return True
    try:
        replay(card.allocator.history, capacity)
    except CardFull:
        return False
    return True


@dataclass(frozen=True)
class _Pass:
    """What one pass of a network did."""

    output: Any  # its tensors on "meta"
    nanoseconds: int
    above: int  # bytes that it took at its most, above what there was
    bytes_in: int
    bytes_out: int


def _remembering(part: nn.Module, fitted: Fitted, card: Card) -> Callable[..., Any]:
    """`part.forward`, which from its third pass with the same shapes on only takes as long as its second did."""
    forward: Callable[..., Any] = part.forward
    passes: Counter[Any] = Counter()
    known: dict[Any, _Pass] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        values, structure = tree_flatten((args, kwargs))
        key = (str(structure), *(_shape(value) for value in values))
        passes[key] += 1
        if passes[key] == 2:
            output, known[key] = _watched(lambda: forward(*args, **kwargs), card)
            return output
        if passes[key] < 2:
            return forward(*args, **kwargs)
        second = known[key]
        card.timeline.run(card.stream, "compute", second.nanoseconds)
        card.allocator.allocated.reach(second.above)
        fitted.note_moved(second.bytes_in, second.bytes_out)
        return _placed(second.output, torch.device("pretend", card.index))

    return run


def _watched(work: Callable[[], Any], card: Card) -> tuple[Any, _Pass]:
    settle()
    counter, begun, crossed = card.allocator.allocated, card.now, (card.bytes_in, card.bytes_out)
    before, highest = counter.now, counter.peak
    counter.reset_peak()
    output = work()
    above, counter.peak = counter.peak - before, max(counter.peak, highest)
    seen = _Pass(
        _placed(output, torch.device("meta")),
        card.now - begun,
        above,
        card.bytes_in - crossed[0],
        card.bytes_out - crossed[1],
    )
    return output, seen


def _placed(values: Any, device: torch.device) -> Any:
    """Tensors laid out as those in `values`, on `device`, with nothing in them."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    return tree_map(place, values)


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else repr(value)
