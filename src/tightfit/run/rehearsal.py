"""A model's call on a pretend card, without weights and without hardware: what would happen, before it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.checkpoint.folder import ModelFolder
from tightfit.errors import PlanError, unknown_name
from tightfit.measure.modules import inspect_pipeline
from tightfit.pretend.allocator import CardFull
from tightfit.pretend.card import SimulatedCard
from tightfit.pretend.history import replay
from tightfit.records import Accelerator, Plan, Prediction, Request, Trace
from tightfit.run.counting import capacity_of, main_dtype
from tightfit.run.stage import SimulationRun, roomy_cards

__all__ = ["simulate_call"]


def simulate_call(
    model: str | ModelFolder,
    accelerator: Accelerator,
    choices: dict[str, Any],
    asked: Request,
    *,
    others: Sequence[Accelerator] = (),
    title: str | None = None,
    card: str | None = None,
    paces: Mapping[str, float] | None = None,
) -> Prediction:
    """What `model`, a known one's name or a checked folder, would do on `accelerator`, under `choices` of Plan fields.

    With `others`, components compute on those of them that the choices name as their device. What `asked` leaves open
    is a known model's usual request, or the pipeline's own defaults. The prediction calls the model `title` and the
    accelerators `card`. Phases by name are played at the `paces` that runs have shown. InputError for unknown names,
    ModelError for a folder that makes no pipeline, RequestError and PlanError for what is illegal.
    """
    all_of_them, shares = (accelerator, *others), not accelerator.is_cpu  # a card is shared with its driver's own bytes
    ours = [each.name for each in all_of_them] if others else ["cuda:0" if shares else "cpu"]
    theirs = [f"pretend:{index}" for index in range(len(ours))]
    chosen = Plan.from_mapping({"device": ours[0]} | choices)
    if chosen.device not in ours:
        raise PlanError(unknown_name("device", chosen.device, ours), device=chosen.device)
    with roomy_cards(all_of_them) as cards:
        pretend = cards[ours.index(chosen.device)]
        stage = SimulationRun(model, pretend, _renamed(chosen, dict(zip(ours, theirs, strict=True))), asked)
        recorder = stage.fitted.recorder
        pretend.watchers.append(lambda _: recorder.look())
        if paces:
            pretend.watchers.append(lambda _: pretend.at_pace(paces.get(recorder.live().phase, 1.0)))
        said = stage.play()
    called = dict(zip(theirs, ours, strict=True))
    plan, trace = _renamed(stage.fitted.plan, called), stage.fitted.report().trace
    capacities = {name: capacity_of(plan, each) for name, each in zip(ours, all_of_them, strict=True)}
    there = zip(cards, capacities.values(), strict=True)
    fits = all(_fits(card, capacity, expandable=plan.expandable_segments) for card, capacity in there)
    name = card or accelerator.product_name or accelerator.name
    return Prediction(
        model=title or (model if isinstance(model, str) else model.path.name),
        card=name,
        capacity=capacities.pop(plan.device),
        other_devices={other: capacity for other, capacity in capacities.items() if other in plan.devices},
        fits=fits,
        plan=plan,
        trace=_on(trace.model_copy(update={"notes": (*trace.notes, *said)}), name, called),
        dtype=main_dtype(inspect_pipeline(stage.pipe).components),
    )


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """`plan` for devices that are called otherwise."""

    def keyed(sizes: Mapping[str, int]) -> dict[str, int]:
        return {names.get(name, name): size for name, size in sizes.items()}

    changes: dict[str, Any] = {"device": names.get(plan.device, plan.device)}
    changes["components"] = {
        name: part.model_copy(update={"device": names.get(part.device, part.device)}) if part.device else part
        for name, part in plan.components.items()
    }
    if plan.budget is not None and plan.budget.devices:
        changes["budget"] = plan.budget.model_copy(update={"devices": keyed(plan.budget.devices)})
    if plan.forecast:
        told = (phase.model_copy(update={"other_devices": keyed(phase.other_devices)}) for phase in plan.forecast)
        changes["forecast"] = tuple(told)
    return plan.model_copy(update=changes)


def _on(trace: Trace, name: str, names: Mapping[str, str]) -> Trace:
    """`trace` as of a device called `name`, and of others that are called otherwise."""
    phases = (
        phase.model_copy(update={"other_devices": {names[other]: peak for other, peak in phase.other_devices.items()}})
        for phase in trace.phases
    )
    return trace.model_copy(update={"device": name, "rss_peak_bytes": 0, "phases": tuple(phases)})


def _fits(card: SimulatedCard, capacity: int, *, expandable: bool) -> bool:
    """Whether a card with `capacity` bytes would do: at once, or by giving its cache back now and then."""
    if card.held.peak <= capacity:
        return True
    try:
        replay(card.allocator.history, capacity, expandable=expandable)
    except CardFull:
        return False
    return True
