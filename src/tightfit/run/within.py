"""A subject, a device and a budget → the Plan that is made for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.devices.seam import Device
from tightfit.plan.planner import make_plan
from tightfit.records import Plan, Request
from tightfit.run.footprints import measure_footprint
from tightfit.run.machines import machine_now
from tightfit.run.wishes import Limits

__all__ = ["plan_within"]


def plan_within(
    subject: Any, request: Request | Mapping[str, Any] | None, target: Device, limits: Limits, dtype: str | None = None
) -> Plan:
    """The plan for `request` of `subject` (see `measure_footprint`) on `target`, within `limits`.

    On a CPU what this process holds by now is part of the budget: what measuring left behind goes first.
    """
    footprint = measure_footprint(subject, request, dtype=dtype)
    return make_plan(footprint, machine_now(target), *limits)
