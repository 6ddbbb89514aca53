"""Weights of a program, looked up in the live module at each use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tightfit.apply.activations.strips.program import Node, Program
from tightfit.apply.module_hooks import is_watched

__all__ = ["LiveWeights"]


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
