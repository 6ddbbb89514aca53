"""Allocator settings of a plan and its budget: expandable segments, and a limit in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import InputError
from tightfit.schema.plan import Plan

__all__ = ["limit_allocators"]


def limit_allocators(plan: Plan, devices: Mapping[str, Device], undo: ExitStack, remark: Callable[[str], None]) -> None:
    """Set up the allocators of `devices`, by name, on which components run; cap those of all others in the budget.

    `remark` is called with a message where the plan cannot be followed.
    """
    for device in devices.values():
        if plan.expandable_segments:
            _grow(device, undo, remark)
        _cap(device, plan, undo)
    for device in _idle(plan, devices):
        _cap(device, plan, undo)


def _grow(device: Device, undo: ExitStack, remark: Callable[[str], None]) -> None:
    fixed = device.expandable_refused()
    if fixed is None:
        undo.callback(device.use_expandable_segments())
    else:
        remark(f"the plan lets segments of the allocator grow, those of {device.name} cannot: {fixed}")


def _idle(plan: Plan, devices: Mapping[str, Device]) -> Iterator[Device]:
    """Yield the devices of this computer that the budget names and on which no component runs."""
    for name in plan.budget.devices if plan.budget else ():
        if name not in devices:
            with suppress(InputError):  # a plan made on another computer
                yield choose_device(name)


def _cap(device: Device, plan: Plan, undo: ExitStack) -> None:
    most = plan.budget and (plan.budget.of(device.name) if device.separate else plan.budget.of_cpu)
    if most:
        device.release_cache()  # cached memory counts towards the limit too
        undo.callback(device.limit_memory(most))
