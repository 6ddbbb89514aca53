"""A preset level, and a user's own choices on top of it → Plan.

0  everything on the device
1  also autoencoders slice and tile
2  also encoders are on the device only while they encode
3  also denoisers stream, all other components are loaded for their phase, and skip activations are offloaded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.errors import PlanError, unknown_name
from tightfit.plan.explain import explain
from tightfit.plan.kernel_choice import LayoutChoice, choose_layout
from tightfit.plan.network_parts import resolve_parts
from tightfit.schema.footprint import Component, Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Placement, Plan, Reason
from tightfit.schema.request import Request

__all__ = ["LEVEL_TILE", "idle_plan", "plan_for"]

LEVEL_TILE = 512  # pixels: large enough that tones seldom shift; a quarter of a megapixel at a time


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
    """Return the plan for `choices`: a level (0 if none) and any Plan fields that override it, all by name.

    `separate` says whether the device has memory of its own; if it has none, weights in host memory are not moved, and
    the reasons say so. `pinnable` bytes of host memory can be page-locked. `accelerator`, if known, decides the memory
    format of convolutions where `choices` leave it open, and lets the reasons name the attention backend. `placed` are
    the reasons of a caller that has chosen where weights are.
    Raises PlanError for unknown components, and for components set to stream that have no layers.
    """
    made = bool(choices.get("forecast"))  # a plan that was made for a budget has its own reasons
    chosen = {key: value for key, value in choices.items() if made or key != "reasons"}
    level = Plan.from_mapping({"level": chosen.get("level")}).level
    base = _preset(footprint, level or 0) | {"level": level, "device": device}
    if request is not None:  # the current request overrides that of a saved plan
        chosen["request"] = request.to_mapping()
    plan = Plan.from_mapping(_merge(base, chosen))
    _check(plan, footprint)
    layouts = {c.name: choose_layout(c, plan.components[c.name], accelerator) for c in footprint.components}
    own = explain(plan, footprint, layouts, separate=separate, moves=not placed, accelerator=accelerator)
    reasons = plan.reasons if made else (*placed, *own)
    plan = _with_layouts(plan, layouts)
    plan = plan if separate else _without_offload(plan)
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


def idle_plan(component: Component, store: str) -> ComponentPlan:
    """Return the plan of a component that never runs: loaded if called after all, or resident if it has no forward."""
    return ComponentPlan(placement="offload", offload_to=store) if component.has_forward else ComponentPlan()


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`, nested mappings field by field."""
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
        if component.split and plan.context > 1:
            raise PlanError(
                f"split puts {name} on several devices, and context={plan.context} ranks have one each: leave one out",
                name=name,
            )


def _with_layouts(plan: Plan, layouts: Mapping[str, LayoutChoice]) -> Plan:
    """Return `plan` with the chosen memory formats."""
    components = {
        name: chosen.model_copy(update={"channels_last": layouts[name].channels_last})
        for name, chosen in plan.components.items()
    }
    return plan.model_copy(update={"components": components})


def _streaming(plan: Plan, footprint: Footprint) -> Plan:
    """Return `plan` with the open fields of streamed components resolved."""
    known = {component.name: component for component in footprint.components}
    components = {name: resolve_parts(known[name], chosen) for name, chosen in plan.components.items()}
    return plan.model_copy(update={"components": components})


def _pinning(plan: Plan, footprint: Footprint, pinnable: int) -> Plan:
    """Return `plan` with offloaded weights page-locked within `pinnable` bytes, streamed components first."""
    sizes = {component.name: component.bytes for component in footprint.components}
    components = dict(plan.components)
    pinnable -= sum(sizes[name] for name, chosen in components.items() if chosen.pinned)
    for name in sorted(components, key=lambda name: components[name].placement != "stream"):
        chosen = components[name]
        parts = chosen.parts("").values()
        moves = any(part.placement != "resident" and part.store.is_host_memory for part in parts)
        if not moves or chosen.pinned is not None:
            continue
        pinned = sizes[name] <= pinnable
        pinnable -= sizes[name] * pinned
        components[name] = chosen.model_copy(update={"pinned": pinned})
    return plan.model_copy(update={"components": components})


def _without_offload(plan: Plan) -> Plan:
    """Return `plan` for a device whose memory is host memory: nothing is offloaded to that."""
    left = dict.fromkeys(("weight_memory", "granularity", "ring_buffer", "resident_layers", "pinned")) | {
        "placement": "resident"
    }
    stay = {n: c.model_copy(update=left) if c.store.is_host_memory else c for n, c in plan.components.items()}
    vae = plan.vae.model_copy(update={"feature_maps": "device"}) if plan.vae.feature_maps == "host" else plan.vae
    return plan.model_copy(update={"components": stay, "offload_activations": False, "vae": vae})
