"""A model's call on a pretend card, without weights and without hardware: what would happen, before it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.checkpoint.folder import ModelFolder
from tightfit.pretend.allocator import CardFull
from tightfit.pretend.card import Card
from tightfit.pretend.history import replay
from tightfit.records import Accelerator, Prediction, Request
from tightfit.run.counting import capacity_of
from tightfit.run.stage import Stage, roomy_card

__all__ = ["rehearse"]


def rehearse(
    model: str | ModelFolder,
    accelerator: Accelerator,
    choices: dict[str, Any],
    asked: Request,
    *,
    title: str | None = None,
    card: str | None = None,
    paces: Mapping[str, float] | None = None,
) -> Prediction:
    """What `model`, a known one's name or a checked folder, would do on `accelerator`, under `choices` of Plan fields.

    What `asked` leaves open is a known model's usual request, or the pipeline's own defaults. The prediction calls
    the model `title` and the accelerator `card`. Phases by name are played at the `paces` that runs have shown.
    InputError for unknown names, ModelError for a folder that makes no
    pipeline, RequestError and PlanError for what is illegal.
    """
    with roomy_card(accelerator) as pretend:
        stage = Stage(model, pretend, choices, asked)
        recorder = stage.fitted.recorder
        pretend.watchers.append(lambda _: recorder.look())
        if paces:
            pretend.watchers.append(lambda _: pretend.at_pace(paces.get(recorder.live().phase, 1.0)))
        stage.play()
    shares = not accelerator.is_cpu  # a card is shared with its driver's own bytes
    plan = stage.fitted.plan
    capacity = capacity_of(plan, accelerator)
    name = card or accelerator.title or accelerator.name
    trace = stage.fitted.report().trace
    return Prediction(
        model=title or (model if isinstance(model, str) else model.path.name),
        card=name,
        capacity=capacity,
        fits=_fits(pretend, capacity, expandable=plan.growing_segments),
        plan=plan.model_copy(update={"device": "cuda:0" if shares else "cpu"}),
        trace=trace.model_copy(update={"device": name, "rss_peak_bytes": 0}),
    )


def _fits(card: Card, capacity: int, *, expandable: bool) -> bool:
    """Whether a card with `capacity` bytes would do: at once, or by giving its cache back now and then."""
    if card.held.peak <= capacity:
        return True
    try:
        replay(card.allocator.history, capacity, expandable=expandable)
    except CardFull:
        return False
    return True
