"""The weights that a program names, looked up in the live module whenever they are used."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tightfit.apply.activations.strips.program import Node, Program
from tightfit.apply.module_hooks import is_watched

__all__ = ["LiveWeights"]


class LiveWeights:
    """Weights of `module`: where they are and in what form is others' affair, who are told when a layer works."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        self._owners = {node.name: _owner(module, node.name) for node in program.nodes if node.op == "weight"}
        self._paths = {name: _path(module, name) for name in self._owners}
        self._constants = program.constants
        self._moved: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, node: Node, device: torch.device) -> torch.Tensor:
        """The tensor that `node` stands for, on `device`."""
        if node.op == "constant":
            key = node.name, device
            if key not in self._moved:
                self._moved[key] = self._constants[node.name].to(device)
            return self._moved[key]
        owner, name = self._owners[node.name]
        found = owner._parameters.get(name)
        return owner._buffers[name] if found is None else found  # type: ignore[return-value]

    def watched(self, nodes: Iterable[Node]) -> tuple[nn.Module, ...]:
        """The layers that own these weights, and the modules around them, where somebody watches those by now."""
        around = dict.fromkeys(layer for node in nodes for layer in self._paths.get(node.name, ()))
        return tuple(filter(is_watched, around))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _path(module: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """The modules around the weight `name`, from the outside inwards; not `module` itself."""
    parts = name.split(".")[:-1]
    return tuple(module.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))
