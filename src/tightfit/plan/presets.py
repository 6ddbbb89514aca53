"""The four levels, and a user's own choices on top of them → Plan.

0  everything on the device
1  and autoencoders slice and tile
2  and encoders are on the device only while they encode
3  and the denoiser streams by units, the rest comes for its phase, activations that wait are moved off
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.errors import PlanError, unknown_name
from tightfit.plan.explain import explain
from tightfit.plan.kernel_choice import LayoutChoice, choose_layout
from tightfit.plan.layer_selection import resolve_streaming
from tightfit.schema.footprint import Component, Footprint, Request
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, OffloadTarget, Placement, Plan, Reason

__all__ = ["LEVEL_TILE", "idle_plan", "plan_for"]

LEVEL_TILE = 512  # pixels: large enough that tones seldom shift, a quarter of a megapixel at a time


def plan_for(
    footprint: Footprint,
    device: str,
    *,
    separate: bool,
    choices: Mapping[str, Any],
    request: Request | None = None,
    pinnable: int = 0,
    accelerator: Accelerator | None = None,
    placed: Sequence[Reason] = (),
) -> Plan:
    """The plan for `choices`: a level (0 if none) and any Plan fields to differ from it, all by name.

    `separate` says whether the device has memory of its own; where it has none, weights in host memory stay where
    they are and the reasons say so. `pinnable` bytes of host memory can be page-locked. What is known of the device as
    an `accelerator` settles which layout convolutions have, where that is left open, and tells who computes attention.
    Who has decided where weights are says why, in `placed`.
    Raises PlanError for unknown components and what they cannot do.
    """
    made = bool(choices.get("forecast"))  # for a budget, by who says why
    chosen = {key: value for key, value in choices.items() if made or key != "reasons"}
    level = Plan.from_mapping({"level": chosen.get("level")}).level
    base = _preset(footprint, level or 0) | {"level": level, "device": device}
    if request is not None:  # what is asked for now wins over what a saved plan was made for
        chosen["request"] = request.to_mapping()
    plan = Plan.from_mapping(_merge(base, chosen))
    _check(plan, footprint)
    layouts = {c.name: choose_layout(c, plan.components[c.name], accelerator) for c in footprint.components}
    own = explain(plan, footprint, layouts, separate=separate, moves=not placed, accelerator=accelerator)
    reasons = plan.reasons if made else (*placed, *own)
    plan = _laid_out(plan, layouts)
    plan = plan if separate else _settled(plan)
    plan = _pinning(_streaming(plan, footprint), footprint, pinnable)
    return plan.model_copy(update={"reasons": reasons})


def _preset(footprint: Footprint, level: int) -> dict[str, Any]:
    components = {c.name: {"placement": _placement(c, level)} for c in footprint.components}
    vae = {"slicing": True, "tile": LEVEL_TILE} if level >= 1 else {}
    return {"components": components, "vae": vae, "offload_activations": level >= 3}


def _placement(component: Component, level: int) -> Placement:
    if not component.has_forward:
        return "resident"
    if level >= 3:
        return "stream" if component.role == "denoiser" and component.layers else "offload"
    return "offload" if level == 2 and component.role == "encoder" else "resident"


def idle_plan(component: Component, store: OffloadTarget) -> ComponentPlan:
    """Where a component is that never works: it comes if somebody asks for it after all, or is there to be read."""
    return ComponentPlan(placement="offload", offload_to=store) if component.has_forward else ComponentPlan()


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, mappings field by field."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _check(plan: Plan, footprint: Footprint) -> None:
    known = {component.name: component for component in footprint.components}
    for name, component in plan.components.items():
        if name not in known:
            raise PlanError(unknown_name(f"component of {footprint.pipeline}", name, known), name=name)
        if component.placement == "stream" and not known[name].layers:
            raise PlanError(f"{name} has no layers to stream: offload would work", name=name)


def _laid_out(plan: Plan, layouts: Mapping[str, LayoutChoice]) -> Plan:
    """`plan` with all layouts as they were chosen."""
    settled = {
        name: chosen.model_copy(update={"channels_last": layouts[name].channels_last})
        for name, chosen in plan.components.items()
    }
    return plan.model_copy(update={"components": settled})


def _streaming(plan: Plan, footprint: Footprint) -> Plan:
    """`plan` with all decided about what streams."""
    known = {component.name: component for component in footprint.components}
    settled = {
        name: resolve_streaming(known[name], chosen) if chosen.placement == "stream" else chosen
        for name, chosen in plan.components.items()
    }
    return plan.model_copy(update={"components": settled})


def _pinning(plan: Plan, footprint: Footprint, pinnable: int) -> Plan:
    """`plan` with the masters page-locked of what moves, the most travelled first, as far as `pinnable` bytes go."""
    sizes = {component.name: component.bytes for component in footprint.components}
    components = dict(plan.components)
    pinnable -= sum(sizes[name] for name, chosen in components.items() if chosen.pinned)
    for name in sorted(components, key=lambda name: components[name].placement != "stream"):
        chosen = components[name]
        if chosen.placement == "resident" or chosen.offload_to != "cpu" or chosen.pinned is not None:
            continue
        pinned = sizes[name] <= pinnable
        pinnable -= sizes[name] * pinned
        components[name] = chosen.model_copy(update={"pinned": pinned})
    return plan.model_copy(update={"components": components})


def _settled(plan: Plan) -> Plan:
    """`plan` where host memory is the device's memory: nothing can be moved off it, but to the disk."""
    left = dict.fromkeys(("weight_memory", "granularity", "ring_buffer", "resident_layers", "pinned")) | {
        "placement": "resident"
    }
    stay = {n: c if c.offload_to == "disk" else c.model_copy(update=left) for n, c in plan.components.items()}
    vae = plan.vae.model_copy(update={"feature_maps": "device"}) if plan.vae.feature_maps == "host" else plan.vae
    return plan.model_copy(update={"components": stay, "offload_activations": False, "vae": vae})
