"""The offload manager of each device on which components run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from torch import nn

from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.network_parts import part_views
from tightfit.apply.weights.part_offloaders import PartOffloaders
from tightfit.apply.weights.placed_groups import HostBytes
from tightfit.apply.weights.quantize import left_in_files
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.apply.weights.weight_offloader import WeightOffloader
from tightfit.devices.device import Device
from tightfit.measure.joint_recorder import JointRecorder
from tightfit.schema.plan import ComponentPlan, Plan

__all__ = ["DeviceOffloaders"]


class DeviceOffloaders:
    """An WeightOffloader for each of `devices`, by name, and for the components that run on it by `plan`."""

    def __init__(
        self,
        plan: Plan,
        devices: Mapping[str, Device],
        recorder: JointRecorder,
        file_weights: FileBackedWeights,
        *,
        shares: bool = False,
    ) -> None:
        """With `shares`, weights in host memory may be shared with other processes, by `share`."""
        self._plan, self._devices = plan, devices
        self._all = {
            name: WeightOffloader(device, recorder.of(name), file_weights, shares=shares)
            for name, device in devices.items()
        }
        if plan.schedule:
            passes = [(each.component, each.method) for each in plan.schedule for _ in range(each.runs)]
            unused = {(each.component, each.method): each.unused_blocks for each in plan.schedule}
            early = {
                (each.component, each.method): each.prefetch for each in plan.schedule if each.prefetch is not None
            }
            steps = plan.request.steps if plan.request is not None else None
            for name, manager in self._all.items():
                manager.expect(steps, [each for each in passes if name in plan.parts_of(each[0])], unused, early)

    def of(self, name: str) -> WeightOffloader | PartOffloaders:
        """Return the manager of the component `name`, or those of its parts as one."""
        managers = self.by_part(name)
        return managers[0] if len(managers) == 1 else PartOffloaders(tuple(managers))

    def by_part(self, name: str) -> list[WeightOffloader]:
        """Return the manager of each part of the component `name`: one, unless it is split."""
        return [self._all[device] for device in self._plan.parts_of(name)]

    def leave_out(self, name: str, modules: Sequence[nn.Module], then: Sequence[nn.Module] = ()) -> int:
        """Load nothing in `modules` for the rest of this call of `name`, and nothing in `then` for the next one.

        Return the bytes that were loaded in vain.
        """
        return sum(each.leave_out(name, modules, then) for each in self.by_part(name))

    def devices_of(self, name: str) -> list[Device]:
        """Return the device of each part of the component `name`."""
        return [self._devices[device] for device in self._plan.parts_of(name)]

    def left_in_files(self, name: str, module: nn.Module) -> set[int]:
        """Return ids of weights of `module`, the component `name`, that are read from files when they are used."""
        left: set[int] = set()
        for part, plan, device in self._parts(name, module):
            own = {id(weight) for weight in part.parameters()}
            left |= own.intersection(left_in_files(module, plan, separate=device.separate))
        return left

    def place(self, name: str, module: nn.Module, undo: ExitStack) -> None:
        """Place the weights of `module`, the component `name`, and load them as it runs; `undo` reverts that."""
        managers, parts = self.by_part(name), self._parts(name, module)
        # as a whole: what stays as loaded depends on all of it
        managers[0].store(name, module, self._chosen(name), undo)
        for manager, (part, plan, _) in zip(managers, parts, strict=True):
            manager.place(name, part, plan, undo)
        for manager, (part, plan, _) in zip(managers, parts, strict=True):
            manager.stream(name, part, plan, undo)

    def share(self, share: Callable[[dict[str, WeightGroup]], bool]) -> HostBytes:
        """Call `share` with the groups that were placed since it was last called, and page-lock what it leaves.

        Nothing is on the device. Weights that a call trains are not shared: optimizers have them.
        """
        request, new = self._plan.request, dict[str, WeightGroup]()
        for each in self._all.values() if request is None or request.backward != "parameters" else ():
            new |= each.placed.new()
        if share(new):
            for each in self._all.values():
                each.finish_placing()
        return HostBytes(*map(sum, zip(*(each.placed.host_bytes() for each in self._all.values()), strict=True)))

    def _parts(self, name: str, module: nn.Module) -> list[tuple[nn.Module, ComponentPlan, Device]]:
        chosen = self._chosen(name)
        views = part_views(name, module, chosen) if chosen.split else [module]
        return list(zip(views, self._plan.parts_of(name).values(), self.devices_of(name), strict=True))

    def _chosen(self, name: str) -> ComponentPlan:
        return self._plan.components.get(name, ComponentPlan())

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
