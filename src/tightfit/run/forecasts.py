"""The question of `tightfit plan` → a Prediction, from what is kept or by a rehearsal. Loads torch only for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tightfit.catalog.known import card_called, known_card
from tightfit.checkpoint.folder import ModelFolder
from tightfit.plan.guesses import computer_with
from tightfit.records import Accelerator, Machine, Plan, Prediction, Request
from tightfit.run.counting import counted, reads_disk
from tightfit.run.models import stored_dtype
from tightfit.run.predictions import find_subject, remembered
from tightfit.run.wishes import Limits, demo_request

if TYPE_CHECKING:
    from tightfit.run.footprints import Measurer

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
    own = _own_machine(say) if accelerator is None else None
    accelerator = accelerator or own.accelerators[0]  # type: ignore[union-attr]
    paces: dict[str, float] = {}
    if limits is None and not choices and not accelerator.is_cpu:
        limits = Limits(None)  # all that the card has
    if limits is not None:
        with say("planning"):
            fields, paces = _planned(which, accelerator, asked, limits, own)
    name = title or "the demo model"
    if reads_disk(fields):
        with say("counting"):
            footprint = _measurer(which, accelerator).measure(asked)
            return counted(footprint, accelerator, fields, title=name, card=card, machine=own)

    def rehearsal() -> Prediction:
        with say("rehearsing on a pretend card"):
            from tightfit.run.rehearsal import rehearse

            return rehearse(which, accelerator, fields, asked, title=name, card=card, paces=paces)

    on = card or accelerator.to_mapping() | {"free": None}
    question = {"model": mark, "title": title, "card": on, "choices": fields, "request": asked.to_mapping()}
    question["paces"] = paces
    return remembered(Prediction, question, rehearsal)


def _planned(
    which: str | ModelFolder, accelerator: Accelerator, asked: Request, limits: Limits, own: Machine | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """The plan's fields, and the paces of phases that runs have shown, where it is for this computer's `own` device."""
    from tightfit.run.experiences import Basis, Past

    measurer = _measurer(which, accelerator)
    past = Past(measurer.question(asked) if own is not None else None, accelerator)
    machine = own if own is not None and accelerator.is_cpu else computer_with(accelerator)
    basis = Basis(measurer.measure(asked), machine.model_copy(update={"accelerators": machine.accelerators[:1]}), past)
    plan = basis.plan(limits)
    return plan.model_dump(mode="json", exclude={"device", "request"}), basis.paces(plan)


def _measurer(which: str | ModelFolder, accelerator: Accelerator) -> Measurer:
    """Who measures it in the dtype in which `tightfit run` computes there."""
    from tightfit.run.footprints import Measurer

    usual = None if isinstance(which, str) else stored_dtype(which.components)
    return Measurer(which if isinstance(which, str) else which.path, "float32" if accelerator.is_cpu else usual)


def _own_machine(say: Say) -> Machine:
    with say("looking at this computer"):
        from tightfit.run.machines import measured_machine

        return measured_machine()
