"""What a program reads besides its arguments: weights of the live module, and random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from tightfit.apply.activations.strips.program import Node, Program
from tightfit.apply.module_hooks import is_watched
from tightfit.devices.device import Device

__all__ = ["LiveWeights", "rewinder", "usual_generators"]


class LiveWeights:
    """Weights of `module`, wherever and in whatever form they are; hooks on its layers are called when they run."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        self._owners = {node.name: _owner(module, node.name) for node in program.nodes if node.op == "weight"}
        self._paths = {name: _path(module, name) for name in self._owners}
        self._constants = program.constants
        self._moved: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, node: Node, device: torch.device) -> torch.Tensor:
        """Return the tensor of `node`; constants are copied to `device`."""
        if node.op == "constant":
            key = node.name, device
            if key not in self._moved:
                self._moved[key] = self._constants[node.name].to(device)
            return self._moved[key]
        owner, name = self._owners[node.name]
        found = owner._parameters.get(name)
        return owner._buffers[name] if found is None else found  # type: ignore[return-value]

    def watched(self, nodes: Iterable[Node]) -> tuple[nn.Module, ...]:
        """Return the layers that own these weights, and the modules around them, that hooks watch by now."""
        around = dict.fromkeys(layer for node in nodes for layer in self._paths.get(node.name, ()))
        return tuple(filter(is_watched, around))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _path(module: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """Return the modules around the weight `name`, outermost first, without `module` itself."""
    parts = name.split(".")[:-1]
    return tuple(module.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))


def rewinder(program: Program, device: Device) -> Callable[[], None] | None:
    """Return a function that resets every generator that `program` may draw from on `device` to its current state.

    None if the state of one of them is not accessible.
    """
    if not program.draws_noise:
        return lambda: None
    usual = usual_generators(device)
    if usual is None:
        return None
    own = (node.kwargs.get("generator") for node in program.nodes)
    states = [(it, it.get_state()) for it in (*usual, *own) if it is not None]

    def rewind() -> None:
        for generator, state in states:
            generator.set_state(state)

    return rewind


def usual_generators(device: Device) -> list[torch.Generator] | None:
    """Return the CPU's default generator, and the device's if it has its own; None if that is unknown."""
    place = device.torch_device
    if place.type == "cpu" or device.kind == "simulated":  # a simulated card draws from the CPU's
        return [torch.default_generator]
    offered = getattr(getattr(torch, place.type, None), "default_generators", ())
    return [torch.default_generator, offered[place.index or 0]] if len(offered) > (place.index or 0) else None
