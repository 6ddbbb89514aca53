"""The question of `tightfit plan` → a Prediction, from what is kept or by a rehearsal. Loads torch only for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tightfit.catalog.known import card_called, known_card
from tightfit.checkpoint.folder import ModelFolder
from tightfit.plan.guesses import computer_with
from tightfit.records import Accelerator, Plan, Prediction, Request
from tightfit.run.models import stored_dtype
from tightfit.run.predictions import find_subject, remembered
from tightfit.run.wishes import Limits, demo_request

__all__ = ["forecast"]

Say = Callable[[str], AbstractContextManager[object]]


def forecast(
    model: str | None,
    card: str | None,
    choices: dict[str, Any],
    asked: Request,
    say: Say,
    limits: Limits | None = None,
) -> Prediction:
    """What `model` (a known one, a folder, a hub id; None: the demo model) would do under `choices` of Plan fields.

    Or under the plan that is made within `limits`. On a known card, or on this computer's own device if `card` is
    None. What takes a while is done inside `say(…)`. InputError for unknown names, PlanError and RequestError for what
    is illegal, BudgetTooSmall where nothing fits.
    """
    card = card if card is None else card_called(card)
    accelerator = known_card(card) if card is not None else None  # before anything slow
    which, mark = find_subject(model)
    title = which if isinstance(which, str) else model
    asked = demo_request(asked) if model is None else asked
    fields = {name: value for name, value in choices.items() if name != "device"} or {"level": 0}
    Plan.from_mapping(fields)
    own = accelerator is None
    accelerator = accelerator or _own_device(say)
    paces: dict[str, float] = {}
    if limits is None and not choices and not accelerator.is_cpu:
        limits = Limits(None)  # all that the card has
    if limits is not None:
        with say("planning"):
            fields, paces = _planned(which, accelerator, asked, limits, own=own)

    def rehearsal() -> Prediction:
        with say("rehearsing on a pretend card"):
            from tightfit.run.rehearsal import rehearse

            name = title or "the demo model"
            return rehearse(which, accelerator, fields, asked, title=name, card=card, paces=paces)

    on = card or accelerator.to_mapping() | {"free": None}
    question = {"model": mark, "title": title, "card": on, "choices": fields, "request": asked.to_mapping()}
    question["paces"] = paces
    return remembered(Prediction, question, rehearsal)


def _planned(
    which: str | ModelFolder, accelerator: Accelerator, asked: Request, limits: Limits, *, own: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """The plan's fields, and the paces of phases that runs have shown, where it is for this computer's `own` device."""
    from tightfit.run.experiences import Basis, Past
    from tightfit.run.footprints import Measurer

    folder = None if isinstance(which, str) else which
    usual = None if folder is None else "float32" if accelerator.is_cpu else stored_dtype(folder.components)
    measurer = Measurer(which if folder is None else folder.path, usual)  # as `tightfit run` does
    past = Past(measurer.question(asked) if own else None, accelerator)
    basis = Basis(measurer.measure(asked), computer_with(accelerator), past)
    plan = basis.plan(limits)
    return plan.model_dump(mode="json", exclude={"device", "request"}), basis.paces(plan)


def _own_device(say: Say) -> Accelerator:
    with say("looking at this computer"):
        from tightfit.run.machines import measured_machine

        return measured_machine().accelerators[0]
