"""A pipeline whose calls cannot be measured → the plan under which it runs within its budget all the same.

That is level 3, but lossless: autoencoders work in exact strips instead of blended tiles. Nothing of it is predicted.
"""

from __future__ import annotations

from typing import Any

from tightfit.apply.choices import decide
from tightfit.devices.seam import Device
from tightfit.measure.modules import inspect_pipeline
from tightfit.records import Budget, Plan, Reason, Request
from tightfit.run.within import Site

__all__ = ["plan_unmeasured", "with_reason"]

STRIPS = 4  # an autoencoder's feature maps have a quarter of the device: what is beside them is not known


def plan_unmeasured(pipe: Any, site: Site) -> Plan:
    """Level 3 for the untouched `pipe` on the first device of `site`, in strips, with its budget for a cap."""
    device, budget = site.devices[0], site.limits.budget
    choices: dict[str, Any] = {"level": 3, "vae": {"tile": None, "strips": max(_room(device, budget) // STRIPS, 1)}}
    if device.separate:
        choices["vae"] |= {"maps": "host"}
    elif budget is not None:  # memory is RAM, so weights come from the disk
        choices["components"] = {
            each.name: {"placement": "per-unit" if each.leaves else "per-phase", "home": "disk"}
            for each in inspect_pipeline(pipe).components
        }
    return decide(pipe, choices, None, device).model_copy(update={"budget": budget})


def with_reason(plan: Plan, request: Request, error: Exception) -> Plan:
    """`plan` for `request`, which could not be measured because of `error`."""
    because = f"this pipeline's call could not be measured ({type(error).__name__}: {_first_line(error)})"
    reason = Reason(decision="level 3 under the budget's cap, nothing predicted", because=because)
    return plan.model_copy(update={"request": request, "reasons": (reason, *plan.reasons)})


def _room(device: Device, budget: Budget | None) -> int:
    most = None if budget is None else budget.of(device.name) if device.separate else budget.of_cpu
    return most or device.free_bytes()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
