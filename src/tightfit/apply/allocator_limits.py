"""What a plan and its budget ask of allocators: segments that grow, and no more than so many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import InputError
from tightfit.schema.plan import Plan

__all__ = ["limit_allocators"]


def limit_allocators(plan: Plan, devices: Mapping[str, Device], undo: ExitStack, remark: Callable[[str], None]) -> None:
    """Limits the `devices` on which components compute, by name, and all others that the budget names.

    `remark` is told where the plan cannot be followed.
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
        undo.callback(device.grow_segments())
    else:
        remark(f"the plan lets segments of the allocator grow, those of {device.name} cannot: {fixed}")


def _idle(plan: Plan, devices: Mapping[str, Device]) -> Iterator[Device]:
    """Devices of this computer that the budget names, and on which no component computes."""
    for name in plan.budget.devices if plan.budget else ():
        if name not in devices:
            with suppress(InputError):  # a plan that was made elsewhere
                yield choose_device(name)


def _cap(device: Device, plan: Plan, undo: ExitStack) -> None:
    most = plan.budget and (plan.budget.of(device.name) if device.separate else plan.budget.of_cpu)
    if most:
        device.release_cache()  # what was kept for later counts as well
        undo.callback(device.cap(most))
