"""A budget and devices → the devices and limits that a plan is made for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.plan.multi_device import check_devices
from tightfit.run.limits import Limits
from tightfit.schema.plan import Plan

__all__ = ["PlanTarget", "plan_target_of"]


class PlanTarget(NamedTuple):
    """Devices and limits that a plan is made for."""

    limits: Limits
    devices: tuple[Device, ...]  # one, or those that the budget names

    @property
    def expandable(self) -> bool:
        """Whether the allocators of all devices can have expandable segments."""
        return all(device.expandable_refused() is None for device in self.devices)

    def host_of(self, plan: Plan) -> Device:
        """Return the device that runs the pipeline under `plan`, which was made for this target."""
        return next(device for device in self.devices if device.name == plan.device)


def plan_target_of(limits: Limits, device: str | torch.device | Device | None) -> PlanTarget:
    """Return the target for `device` (None: the default; of several, the one on which denoisers are fastest).

    InputError for unknown devices, PlanError if a budget for several is not for cards only, or not for `device`.
    """
    budget = limits.budget
    if budget is None or not budget.devices:
        return PlanTarget(limits, (choose_device(device),))
    devices = {choose_device(name): size for name, size in budget.devices.items()}
    budget = budget.model_copy(update={"devices": {each.name: size for each, size in devices.items()}})
    host = None if device is None else choose_device(device).name
    check_devices({each.name: each.kind for each in devices}, host)
    return PlanTarget(limits._replace(budget=budget, host=host), tuple(devices))
