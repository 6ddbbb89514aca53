"""A subject, devices and a budget → the Plan that is made for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tightfit.devices.choice import choose_device
from tightfit.devices.seam import Device
from tightfit.records import Plan, Request
from tightfit.run.experiences import Basis, Past
from tightfit.run.footprints import Measurer
from tightfit.run.machines import machine_now
from tightfit.run.wishes import Limits

__all__ = ["Made", "Site", "plan_within", "site_of"]


class Made(NamedTuple):
    """A plan, and what it was made from."""

    plan: Plan
    basis: Basis


class Site(NamedTuple):
    """Where a plan is for, and within what."""

    limits: Limits
    devices: tuple[Device, ...]  # one, or those that the budget names

    @property
    def expandable(self) -> bool:
        """Whether segments of all its allocators can grow."""
        return all(device.fixed_segments() is None for device in self.devices)

    def host_of(self, plan: Plan) -> Device:
        """Where a pipeline computes that follows a plan made for this site."""
        return next(device for device in self.devices if device.name == plan.device)


def site_of(limits: Limits, device: str | torch.device | Device | None) -> Site:
    """What `device` (None: the best, of several wherever denoisers are fastest) means. InputError for unknown ones."""
    budget = limits.budget
    if budget is None or not budget.devices:
        return Site(limits, (choose_device(device),))
    devices = {choose_device(name): size for name, size in budget.devices.items()}
    budget = budget.model_copy(update={"devices": {each.name: size for each, size in devices.items()}})
    host = None if device is None else choose_device(device).name
    return Site(limits._replace(budget=budget, host=host), tuple(devices))


def plan_within(subject: Any, request: Request, site: Site, dtype: str | None = None) -> Made:
    """The plan for `request` of `subject` (see `measure_footprint`) within a site's limits.

    On a CPU what this process holds by now is part of the budget: what measuring left behind goes first.
    """
    measurer = Measurer(subject, dtype, expandable=site.expandable)
    footprint = measurer.measure(request)
    machine = machine_now(*site.devices)
    basis = Basis(footprint, machine, Past(measurer.question(request), machine.accelerators[0]))
    return Made(basis.plan(site.limits), basis)
