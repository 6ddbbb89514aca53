"""A pipeline that was not measured → plans under which it runs within its budget.

A call that cannot be measured beforehand runs at level 3, but lossless: everything streams, and autoencoders run in
exact strips instead of blended tiles. Nothing is predicted.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tightfit.apply.choices import decide
from tightfit.devices.device import Device
from tightfit.errors import BudgetTooSmall, PlanError
from tightfit.measure.modules import find_components, inspect_pipeline
from tightfit.plan.device_maps import with_device_map
from tightfit.plan.layer_selection import resolve_streaming
from tightfit.plan.presets import idle_plan
from tightfit.run.plan_target import PlanTarget
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Component
from tightfit.schema.machine import Budget
from tightfit.schema.plan import ComponentPlan, Plan, Reason
from tightfit.schema.request import Request
from tightfit.schema.stores import default_store
from tightfit.units import format_bytes

__all__ = ["LEVEL", "plan_direct_calls", "plan_unmeasured", "plan_until_called", "with_reason"]

LEVEL = 3
UNPREDICTED = f"level {LEVEL} under the budget's cap, nothing predicted"
STAYING = 3  # a component's weights take at most a third of the device's bytes

STRIP_SHARE = 4  # an autoencoder's strips take a quarter of the device's bytes, as what else is there is not known


def plan_unmeasured(pipe: Any, plan_target: PlanTarget) -> Plan:
    """Return level 3 for the unfitted `pipe` on the first device of `plan_target`, with strips, capped at its budget.

    Each component that can stream does, with at most a third of the device for its weights, until memory runs out.
    BudgetTooSmall if weights that cannot be moved take all of the device.
    """
    device, budget = plan_target.devices[0], plan_target.limits.budget
    free_bytes = _free_bytes(device, budget)
    choices: dict[str, Any] = {"level": LEVEL, "vae": {"tile": None, "strips": max(free_bytes // STRIP_SHARE, 1)}}
    choices["vae"] |= {"feature_maps": "host"} if device.separate else {}
    store = default_store(spare_ram=budget is not None and not device.separate)
    components = inspect_pipeline(pipe).components
    device_map = plan_target.limits.device_map or DeviceMap()
    choices["components"] = {
        each.name: _placed(each, free_bytes // STAYING, device_map.stores.get(each.name, store))
        | ({"device": device_map.cards[each.name]} if each.name in device_map.cards else {})
        for each in components
    }
    if (resident := sum(each.bytes for each in components if not each.has_forward)) >= free_bytes:
        about = f"{format_bytes(resident)} of weights, which the pipeline reads itself, have to stay on {device.name}"
        raise BudgetTooSmall(f"{about}: more than {format_bytes(free_bytes)}", available_bytes=free_bytes)
    plan = decide(pipe, choices, None, device).model_copy(update={"budget": budget})
    return with_device_map(plan, plan_target.limits.device_map)


def _placed(component: Component, free_bytes: int, store: str) -> dict[str, Any]:
    chosen = idle_plan(component, store)
    if component.has_forward and component.layers:
        chosen = ComponentPlan(placement="stream", offload_to=store)
        with contextlib.suppress(PlanError):  # too little: the default is the fewest bytes that run well
            resolve_streaming(component, larger := chosen.model_copy(update={"weight_memory": max(free_bytes, 1)}))
            chosen = larger
    return chosen.model_dump(mode="json", exclude_unset=True)


def plan_until_called(pipe: Any, plan_target: PlanTarget) -> Plan:
    """Return the plan of the unfitted `pipe` until its first call, which is planned for: weights are in RAM."""
    device = plan_target.devices[0]
    placement = {"placement": "offload", "pinned": False} if device.separate else {}
    choices: dict[str, Any] = {"components": dict.fromkeys(find_components(pipe), placement)}
    because = "give fit request=… or example=… to have it earlier"
    reason = Reason(decision="the plan is made at the first call, from its arguments", because=because)
    plan = decide(pipe, choices, None, device)
    plan = plan.model_copy(update={"budget": plan_target.limits.budget, "reasons": (reason,)})
    return with_device_map(plan, plan_target.limits.device_map)


def plan_direct_calls(unmeasured: Plan, now: Plan, because: str) -> Plan | None:
    """Return the `unmeasured` plan for calls of components by themselves, with the reason `because`.

    None if `now` is that plan already, or has room for backward passes.
    """
    if (now.request is None and now.level == LEVEL) or (now.request is not None and now.request.backward is not None):
        return None
    reason = Reason(decision=UNPREDICTED, because=because)
    return unmeasured.model_copy(update={"reasons": (reason, *unmeasured.reasons)})


def with_reason(plan: Plan, request: Request, error: Exception) -> Plan:
    """Return `plan` for `request`, with `error` as the reason why it was not measured, or not planned for later."""
    if isinstance(error, BudgetTooSmall):
        because = f"no plan is sure to do with less ({_first_line(error)}), and this one may"
    else:
        because = f"this pipeline's call could not be measured ({type(error).__name__}: {_first_line(error)})"
    reason = Reason(decision=UNPREDICTED, because=because)
    return plan.model_copy(update={"request": request, "reasons": (reason, *plan.reasons)})


def _free_bytes(device: Device, budget: Budget | None) -> int:
    most = None if budget is None else budget.of(device.name) if device.separate else budget.of_cpu
    return most or device.free_bytes()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
