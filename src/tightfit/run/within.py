"""A subject, a device and a budget → the Plan that is made for them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tightfit.devices.seam import Device
from tightfit.records import Plan, Request
from tightfit.run.experiences import Basis, Past
from tightfit.run.footprints import Measurer
from tightfit.run.machines import machine_now
from tightfit.run.wishes import Limits

__all__ = ["Made", "plan_within"]


class Made(NamedTuple):
    """A plan, and what it was made from."""

    plan: Plan
    basis: Basis


def plan_within(subject: Any, request: Request, target: Device, limits: Limits, dtype: str | None = None) -> Made:
    """The plan for `request` of `subject` (see `measure_footprint`) on `target`, within `limits`.

    On a CPU what this process holds by now is part of the budget: what measuring left behind goes first.
    """
    measurer = Measurer(subject, dtype)
    footprint = measurer.measure(request)
    machine = machine_now(target)
    basis = Basis(footprint, machine, Past(measurer.question(request), *machine.accelerators))
    return Made(basis.plan(limits), basis)
