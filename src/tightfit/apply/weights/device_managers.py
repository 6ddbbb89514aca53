"""Each device's weights: the Residency of the device on which a component computes."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.apply.weights.file_weights import FileBackedWeights
from tightfit.apply.weights.offload_manager import OffloadManager
from tightfit.devices.device import Device
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.schema.plan import Plan

__all__ = ["DeviceOffloadManagers"]


class DeviceOffloadManagers:
    """Where the components of a pipeline that follows `plan` are, on each of `devices` by name."""

    def __init__(
        self,
        plan: Plan,
        devices: Mapping[str, Device],
        recorder: JointRecorder,
        file_weights: FileBackedWeights,
    ) -> None:
        self._plan = plan
        self._all = {name: OffloadManager(device, recorder.of(name), file_weights) for name, device in devices.items()}
        if plan.schedule:
            passes = [(each.component, each.method) for each in plan.schedule for _ in range(each.runs)]
            unused = {(each.component, each.method): each.unused_blocks for each in plan.schedule}
            early = {
                (each.component, each.method): each.prefetch for each in plan.schedule if each.prefetch is not None
            }
            steps = plan.request.steps if plan.request is not None else None
            for name, manager in self._all.items():
                manager.expect(steps, [each for each in passes if plan.device_of(each[0]) == name], unused, early)

    def of(self, name: str) -> OffloadManager:
        """That of the component `name`."""
        return self._all[self._plan.device_of(name)]

    def begin(self, steps: int | None) -> None:
        """A call begins that asks for `steps` steps (None: the usual number)."""
        for each in self._all.values():
            each.begin(steps)

    def end(self) -> int:
        """The call has come to its end; returns how many bytes of RAM the process held, where those are too many."""
        return max(each.end() for each in self._all.values())

    def settled(self) -> None:
        """Everything is where it belongs: what would have led back from the moves is let go."""
        for each in self._all.values():
            each.settled()

    def rest(self) -> None:
        """What is small goes, so that at the next call the modules are looked through for new weights."""
        for each in self._all.values():
            each.rest()

    def clear(self) -> None:
        """Everything that came goes."""
        for each in self._all.values():
            each.clear()
