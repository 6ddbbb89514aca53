"""A level, plan fields or a plan file, as a user chose → the Plan for a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tightfit.apply.weights.quantize import check_storage
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.measure.kept_rates import known_accelerator
from tightfit.measure.modules import inspect_pipeline
from tightfit.plan.presets import plan_for
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.request import Request

__all__ = ["choices_of", "decide"]


def choices_of(
    level: int | None,
    plan: Plan | Mapping[str, Any] | str | Path | None,
    device: str | torch.device | Device | None,
) -> tuple[dict[str, Any], Device]:
    """Return the user's choices as Plan fields without the device, and the device. Raises PlanError or InputError."""
    if (level is None) == (plan is None):
        raise PlanError("fit takes exactly one of level=0…3 and plan=…")
    choices: dict[str, Any] = {"level": level} if plan is None else _fields(plan)
    wanted: str | None = choices.pop("device", None)
    target = choose_device(device if device is not None else wanted)
    if wanted is not None and choose_device(wanted).name != target.name:
        raise PlanError(f"the plan is for {wanted}, but device={target.name} was asked for: leave one out")
    return choices, target


def decide(pipe: Any, choices: dict[str, Any], request: Request | Mapping[str, Any] | None, target: Device) -> Plan:
    """Return the plan for `pipe` on `target` with these choices. Changes nothing in `pipe`."""
    if isinstance(request, Mapping):
        request = Request.from_mapping(request)
    plan = plan_for(
        inspect_pipeline(pipe),
        target.name,
        separate=target.separate,
        choices=choices,
        request=request,
        pinnable=target.pinnable(),
        accelerator=known_accelerator(target),
    )
    check_storage(plan)
    return _with_device_names(plan)


def _with_device_names(plan: Plan) -> Plan:
    """Return `plan` with the full device name of each component ("cuda:0" for "cuda"); None if it is the plan's."""
    names = {said: choose_device(said).name for said in plan.devices if said != plan.device}

    def named(part: ComponentPlan) -> ComponentPlan:
        own = None if part.device is None else names.get(part.device, plan.device)
        split = {names.get(said, said): later for said, later in part.split.items()}
        return part.model_copy(update={"device": None if own == plan.device else own, "split": split})

    components = {name: named(part) for name, part in plan.components.items()}
    for name, part in components.items():
        if (own := part.device or plan.device) in part.split:
            raise PlanError(f"components.{name}.split: {own} is where {name} begins already", name=name)
    return plan.model_copy(update={"components": components})


def _fields(plan: Plan | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(plan, Plan):
        return plan.model_dump(mode="json", exclude_unset=True)  # the level sets all other fields
    if isinstance(plan, Mapping):
        return dict(plan)
    return Plan.fields_from_file(plan)
