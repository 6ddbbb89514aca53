"""The devices on which components run by a plan, and what records on each of them."""

from __future__ import annotations

from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.errors import PlanError
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import Plan

__all__ = ["devices_of"]


def devices_of(plan: Plan, host: Device, recorder: JointRecorder) -> dict[str, Device]:
    """Return the devices on which components run by `plan`, by name; the pipeline's own is `host`.

    `recorder` gets a recorder for each of the others. Raises PlanError if there are others and one is no card.
    """
    devices = {name: host if name == plan.device else choose_device(name) for name in plan.devices}
    others = {name: device for name, device in devices.items() if device is not host}
    for name, device in devices.items():
        if others and device.allocated_bytes() is None:
            raise PlanError(f"several devices have to be cards, which count bytes: {name} is none", device=name)
    known = recorder.others
    recorder.others = {name: known.get(name) or Recorder(device) for name, device in others.items()}
    return devices
