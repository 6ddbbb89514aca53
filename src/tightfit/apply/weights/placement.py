"""Which weights are on the device when: components that stay, that come for their phase, that come by units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from tightfit.apply.weights.cargo import Cargo
from tightfit.devices.seam import Device
from tightfit.measure.modules import find_units, weight_bytes, weight_tensors
from tightfit.measure.recorder import Recorder
from tightfit.records import Placement

__all__ = ["Residency"]

HOST = torch.device("cpu")
ALTERNATIONS = 4  # changes of turn between two components in one call, after which they stay together


class Residency:
    """Keeps the weights of a pipeline's components where the plan wants them.

    A component that comes for its phase goes when another starts to work, unless the two alternate (a
    ControlNet and its UNet): those stay together from then on.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._cargo: dict[str, Cargo] = {}
        self._units: list[Cargo] = []
        self._turns: Counter[frozenset[str]] = Counter()
        self._together: set[frozenset[str]] = set()
        self._last: str | None = None

    def place(self, name: str, module: nn.Module, placement: Placement, undo: ExitStack) -> None:
        """Arranges for `module`, the component `name`, and registers in `undo` how to take it back."""
        if placement == "resident" and self._device.swaps_parameters:
            cargo = Cargo(module, self._device, self._recorder)
            cargo.bring()
            undo.callback(cargo.evict)
            return
        if placement == "resident" or not self._device.separate:
            undo.callback(_move(module, self._device.torch_device))
            size = weight_bytes(module)
            self._recorder.weights_changed(size)
            undo.callback(self._recorder.weights_changed, -size)
            return
        undo.callback(_move(module, HOST))
        units = find_units(module) if placement == "per-unit" else {}
        self._cargo[name] = Cargo(module, self._device, self._recorder, without=units.values())
        for unit in units.values():
            self._stream(unit, undo)

    def _stream(self, unit: nn.Module, undo: ExitStack) -> None:
        """Brings one unit in before each of its forward passes and forgets it after."""
        cargo = Cargo(unit, self._device, self._recorder)
        self._units.append(cargo)

        def before(*_: object) -> None:
            cargo.bring()

        def after(*_: object) -> None:
            self._recorder.leave()
            cargo.evict()

        undo.callback(unit.register_forward_pre_hook(before, prepend=True).remove)
        undo.callback(unit.register_forward_hook(after, always_call=True).remove)

    def enter(self, name: str) -> None:
        """The component `name` starts to work: those it does not share the device with go, and it comes."""
        self.make_room(name)
        self.bring(name)

    def make_room(self, name: str) -> None:
        """What `name` does not share the device with goes."""
        if self._last not in (None, name):
            self._take_turns(frozenset((name, self._last or "")))
        self._last = name
        for other, cargo in self._cargo.items():
            if other != name and cargo.aboard and frozenset((name, other)) not in self._together:
                cargo.evict()

    def bring(self, name: str) -> None:
        if name in self._cargo:
            self._cargo[name].bring()

    def _take_turns(self, pair: frozenset[str]) -> None:
        self._turns[pair] += 1
        if self._turns[pair] > ALTERNATIONS and pair not in self._together:
            self._together.add(pair)
            self._recorder.note(f"{' and '.join(sorted(pair))} take turns: they stay on the device together")

    def clear(self) -> None:
        """Everything that came goes, as between calls."""
        for cargo in (*self._units, *self._cargo.values()):
            if cargo.aboard:
                cargo.evict()
        self._turns.clear()
        self._last = None


def _move(module: nn.Module, target: torch.device) -> Callable[[], None]:
    """Moves the weights of `module` to `target`; returns how to move each back to where it was."""
    homes = {id(tensor): tensor.device for tensor in weight_tensors(module)}
    usual = next(iter(homes.values()), target)  # for what is loaded in the meantime

    def move(home: Callable[[torch.Tensor], torch.device]) -> None:
        for tensor in weight_tensors(module):
            if tensor.device != home(tensor) and not tensor.is_meta:  # of what is only a shape, the host has no copy
                tensor.data = tensor.data.to(home(tensor))

    move(lambda tensor: target)
    return lambda: move(lambda tensor: homes.get(id(tensor), usual))
