"""Arguments of `tightfit plan` → a Prediction, from the cache, the planner, or a simulation, which loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tightfit.catalog.known import card_called, known_card
from tightfit.checkpoint.folder import ModelFolder
from tightfit.errors import BudgetTooSmall, InputError, PlanError, unknown_name
from tightfit.plan.default_rates import computer_with
from tightfit.plan.options import SearchCaches
from tightfit.run.answer_cache import cached, footprint_question, marked, recalled_footprint
from tightfit.run.cache_choice import plan_with_cache
from tightfit.run.count import PLANNED_NOTE, counted, needs_store_rates
from tightfit.run.garbage import raised_threshold
from tightfit.run.limits import Limits
from tightfit.run.models import resolve_model, stored_dtype
from tightfit.run.plan_options import demo_request
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.schema.results import Prediction
from tightfit.schema.step_cache import StepCache
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightfit.run.footprints import Measurer

__all__ = ["forecast"]

Say = Callable[[str], AbstractContextManager[object]]


def forecast(
    model: str | None,
    card: str | None,
    choices: dict[str, Any],
    request: Request,
    say: Say,
    limits: Limits | None = None,
    *,
    simulated: bool = False,
) -> Prediction:
    """Predict the call `request` of `model` (a known one, a folder, a hub id; None: the demo model).

    It runs under `choices` of Plan fields, or under the plan made within `limits`; on the known `card`, or several with
    commas between; if `card` is None, on this computer's first device, or on those that the budget names. Slow steps
    run inside `say(…)`. A plan within limits is not simulated, unless `simulated`: its own forecast is returned, which
    is faster, and needs no torch if the footprint is cached. InputError for unknown names, PlanError and RequestError
    for invalid values, BudgetTooSmall if nothing fits.
    """
    known = _known_cards(card)  # before the slow steps
    which, mark = resolve_model(model)
    chosen = limits is None and bool(choices)
    title = which if isinstance(which, str) else model
    request = demo_request(request) if model is None else request
    fields = {name: value for name, value in choices.items() if len(known) > 1 or name != "device"} or {"level": 0}
    Plan.from_mapping(fields)
    own = None if known else _own_machine(say)
    accelerator, *others = known or _own_devices(own, limits)
    planned = None
    if limits is None and not choices and not accelerator.is_cpu:
        limits = Limits(None)  # all of the card's memory
    if limits is not None:
        called = [each.name for each in (accelerator, *others)]
        limits = _among(called if others or not known else [card_called(card or "")], limits)
        with say("planning"), raised_threshold():
            planned = _planned(which, mark, (accelerator, *others), request, limits, own)
    fields, time_scales = (planned.fields, planned.time_scales) if planned else (fields, {})
    name = title or "the demo model"
    card = " and ".join(each.name for each in (accelerator, *others)) if others else card and card_called(card)
    if needs_store_rates(fields):
        with say("counting"):
            measured = planned.footprint if planned else _measurer(which, accelerator).measure(request)
            found = counted(measured, accelerator, fields, others=others, title=name, card=card, machine=own)
        return found.model_copy(update={"rates": _rates(accelerator, own, time_scales)})

    def simulation() -> Prediction:
        with say("simulating"):
            from tightfit.run.simulate import simulate_call

            return simulate_call(
                which, accelerator, fields, request, others=others, title=name, card=card, time_scales=time_scales
            )

    if planned and not simulated:
        found = counted(
            planned.footprint, accelerator, fields, others=others, title=name, card=card, machine=own, note=PLANNED_NOTE
        )
    else:
        on = card if known else [each.to_mapping() | {"free": None} for each in (accelerator, *others)]
        question = {"model": mark, "title": title, "card": on, "choices": fields, "request": request.to_mapping()}
        question["paces"] = time_scales
        found = cached(Prediction, question, simulation)
    instead = None
    if chosen and not found.fits and not others:
        with say("looking for what would fit"):
            instead = _instead(which, accelerator, request, own, mark)
    return found.model_copy(update={"rates": _rates(accelerator, own, time_scales), "would_fit": instead})


def _rates(
    accelerator: Accelerator, own: Machine | None, time_scales: Mapping[str, float]
) -> Literal["nominal", "measured", "learned", "guessed"]:
    """Source of the rates that times on `accelerator` are computed from."""
    if own is None:
        return "nominal"
    return "learned" if time_scales else "measured" if accelerator.arithmetic_rates else "guessed"


def _instead(
    which: str | ModelFolder, accelerator: Accelerator, request: Request, own: Machine | None, mark: str
) -> str:
    """A sentence on what would fit on `accelerator`."""
    try:
        plan = Plan.from_mapping(_planned(which, mark, (accelerator,), request, Limits(None), own).fields)
    except BudgetTooSmall as error:
        return str(error)
    peak = max(phase.peak_bytes for phase in plan.forecast)
    seconds = format_seconds(sum(phase.seconds for phase in plan.forecast))
    return f"a plan for this card, without a level, fits: {format_bytes(peak)} at the most, {seconds}"


def _known_cards(names: str | None) -> list[Accelerator]:
    """Known cards; of several, each has the name used in budgets: "rtx3060", and a second one "rtx3060#2"."""
    called = [card_called(name) for name in names.split(",")] if names is not None else []
    if len(called) < 2:
        return [known_card(name) for name in called]
    numbers = [called[: index + 1].count(name) for index, name in enumerate(called)]
    named = [name if number == 1 else f"{name}#{number}" for name, number in zip(called, numbers, strict=True)]
    return [
        known.model_copy(update={"name": name, "product_name": known.name})
        for name, known in zip(named, map(known_card, called), strict=True)
    ]


def _own_devices(own: Machine | None, limits: Limits | None) -> list[Accelerator]:
    """This computer's first device, or those that the budget names. InputError for unknown ones."""
    assert own is not None
    budget = limits.budget if limits is not None else None
    by_name = {accelerator.name: accelerator for accelerator in own.accelerators}
    for name in budget.devices if budget else ():
        if name not in by_name:
            raise InputError(unknown_name("device of this computer", name, by_name), name=name)
    return [by_name[name] for name in budget.devices] if budget and budget.devices else [own.accelerators[0]]


def _among(names: Sequence[str], limits: Limits) -> Limits:
    """`limits` with a budget for the cards `names`; for a single one, without its name. PlanError for other cards."""
    budget = limits.budget
    for name in budget.devices if budget else ():
        if name not in names:
            raise PlanError(unknown_name("card", name, names), name=name)
    if budget is None or not budget.devices or len(names) > 1:
        return limits
    return limits._replace(budget=Budget(device=budget.devices[names[0]], ram=budget.ram))


class _Planned(NamedTuple):
    """A plan for cards, or for this computer."""

    fields: dict[str, Any]
    time_scales: dict[str, float]  # measured over predicted time of phases by name, if it is for this computer
    footprint: Footprint


def _planned(
    which: str | ModelFolder, mark: str, accelerators: Sequence[Accelerator], request: Request, limits: Limits,
    own: Machine | None,
) -> _Planned:  # fmt: skip
    """Plan `request` within `limits`, for this computer's `own` device or for known cards. Raises BudgetTooSmall."""
    from tightfit.run.calibration import CalibrationStore, PlanningInputs

    first, *others = accelerators
    machine = own if own is not None and first.is_cpu else computer_with(*accelerators)
    machine = machine.model_copy(update={"accelerators": machine.accelerators[: len(accelerators)]})
    named = limits._replace(budget=_for_each(machine.accelerators, limits.budget)) if others else limits
    if limits.may_choose_cache and isinstance(which, ModelFolder):
        from tightfit.run.calibrated_caches import with_calibrations

        named = with_calibrations(named, which)

    def inputs_with(cache: StepCache | None) -> PlanningInputs:
        search = SearchCaches()
        kept = _kept_footprint(which, mark, machine, request, limits, cache, search)
        measurer = _measurer(which, first, cache) if kept is None or own is not None else None
        learns = own is not None and not others
        questions = [
            measurer.with_cache(each).question(request) if measurer and learns else None for each in (cache, None)
        ]
        store = CalibrationStore(questions[0], first, questions[1])

        def inputs_of(bare: Footprint) -> PlanningInputs:
            return PlanningInputs(bare, machine, store, None, search, cache)

        if measurer is None:
            assert kept is not None
            return inputs_of(kept)
        return inputs_of(measurer.measure(request, None, lambda bare: inputs_of(bare).missing(named)))

    plan, inputs = plan_with_cache(named, inputs_with)
    fields = plan.model_dump(mode="json", exclude={"request"} if others else {"device", "request"})
    time_scales = {} if others else inputs.time_scales(plan)
    return _Planned(fields, time_scales, inputs.footprint)


def _for_each(accelerators: Sequence[Accelerator], budget: Budget | None) -> Budget:
    """A budget for each of several cards: `budget` if it names them, else all their memory. PlanError if ambiguous."""
    if budget is not None and budget.devices:
        return budget
    if budget is not None and budget.device is not None:
        example = ",".join(f"{each.name}={budget.device // 10**9 or 1}GB" for each in accelerators)
        raise PlanError(f"{budget.device} bytes of which card? Say it of each: --budget {example}")
    return Budget(devices={each.name: each.bytes for each in accelerators}, ram=budget.ram if budget else None)


def _kept_footprint(
    which: str | ModelFolder, mark: str, machine: Machine, request: Request, limits: Limits,
    cache: StepCache | None, search: SearchCaches,
) -> Footprint | None:  # fmt: skip
    """The footprint that `_measurer` would find on disk for a plan within `limits`; does not measure.

    What is found out about plans for it is in `search`.
    """
    first, *others = machine.accelerators
    dtype, expandable = _dtype(which, first), first.expandable_refused is None

    def missing(bare: Footprint) -> tuple[str, ...]:
        from tightfit.run.calibration import CalibrationStore, PlanningInputs

        return PlanningInputs(bare, machine, CalibrationStore(None, first), None, search).missing(limits)

    question = footprint_question(marked(mark, cache), request, dtype, expandable=expandable)
    return recalled_footprint(question, None if others else missing) if mark else None


def _dtype(which: str | ModelFolder, accelerator: Accelerator) -> str | None:
    """Compute dtype of `tightfit run` on `accelerator`; None: a known model's usual one."""
    default = None if isinstance(which, str) else stored_dtype(which.components)
    return "float32" if accelerator.is_cpu else default


def _measurer(which: str | ModelFolder, accelerator: Accelerator, cache: StepCache | None = None) -> Measurer:
    """A Measurer with the dtype of `tightfit run` on `accelerator`, of denoisers with `cache`."""
    from tightfit.run.footprints import Measurer

    subject = which if isinstance(which, str) else which.path
    expandable = accelerator.expandable_refused is None
    return Measurer(subject, _dtype(which, accelerator), expandable=expandable).with_cache(cache)


def _own_machine(say: Say) -> Machine:
    with say("looking at this computer"):
        from tightfit.run.planning_context import measured_machine

        return measured_machine()
