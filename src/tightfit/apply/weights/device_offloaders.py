"""The offload manager of each device on which components run."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.apply.weights.stores import FileBackedWeights
from tightfit.apply.weights.weight_offloader import WeightOffloader
from tightfit.devices.device import Device
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.schema.plan import Plan

__all__ = ["DeviceOffloaders"]


class DeviceOffloaders:
    """An WeightOffloader for each of `devices`, by name, and for the components that run on it by `plan`."""

    def __init__(
        self,
        plan: Plan,
        devices: Mapping[str, Device],
        recorder: JointRecorder,
        file_weights: FileBackedWeights,
    ) -> None:
        self._plan = plan
        self._all = {name: WeightOffloader(device, recorder.of(name), file_weights) for name, device in devices.items()}
        if plan.schedule:
            passes = [(each.component, each.method) for each in plan.schedule for _ in range(each.runs)]
            unused = {(each.component, each.method): each.unused_blocks for each in plan.schedule}
            early = {
                (each.component, each.method): each.prefetch for each in plan.schedule if each.prefetch is not None
            }
            steps = plan.request.steps if plan.request is not None else None
            for name, manager in self._all.items():
                manager.expect(steps, [each for each in passes if plan.device_of(each[0]) == name], unused, early)

    def of(self, name: str) -> WeightOffloader:
        """Return the manager of the component `name`."""
        return self._all[self._plan.device_of(name)]

    def begin(self, steps: int | None) -> None:
        """Begin a call with `steps` steps (None: the default number)."""
        for each in self._all.values():
            each.begin(steps)

    def end(self) -> int:
        """End the call; return the bytes of RAM that the process held, if above the limit, else 0."""
        return max(each.end() for each in self._all.values())

    def settled(self) -> None:
        """Discard the original tensors, kept to undo the moves: all weights are placed."""
        for each in self._all.values():
            each.discard_originals()

    def rest(self) -> None:
        """Evict small tensors, so that the next call searches the modules for new weights."""
        for each in self._all.values():
            each.rest()

    def clear(self) -> None:
        """Evict everything that was loaded."""
        for each in self._all.values():
            each.clear()
