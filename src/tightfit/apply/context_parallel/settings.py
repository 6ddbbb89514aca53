"""A network's settings, of which its exported program was made, and whether they are still the same."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

__all__ = ["NetworkSettings"]

# of every module: weights, which a program reads live, and hooks, which run around it
_OTHERS = frozenset(vars(nn.Module())) - {"training"}
DEEPEST = 4  # containers and attention processors within one another that are looked into
_MISSING = object()


class NetworkSettings:
    """The values that the modules of `network` and their attention processors refer to, as they were at first.

    Scales of adapters, FreeU and other switches are among them; weights and hooks are not.
    """

    def __init__(self, network: nn.Module) -> None:
        self._values: list[tuple[Any, Any, Any]] = []  # container, key, value
        self._sizes: list[tuple[Any, int]] = []  # containers and how many values they have
        self._versions: list[tuple[torch.Tensor, int]] = []
        for module in network.modules():
            for own in (module._modules, module._parameters, module._buffers):
                self._sizes.append((own, len(own)))
            self._values += [(module._modules, name, part) for name, part in module._modules.items()]
            self._note(vars(module), DEEPEST, _OTHERS)

    @property
    def unchanged(self) -> bool:
        """Whether all of them are the same objects, and tensors among them have not been written to."""
        return (
            all(len(container) == size for container, size in self._sizes)
            and all(_get(container, key) is value for container, key, value in self._values)
            and all(tensor._version == version for tensor, version in self._versions)
        )

    def _note(self, container: Any, depth: int, left_out: frozenset[str] = frozenset()) -> None:
        self._sizes.append((container, len(container)))
        pairs = container.items() if isinstance(container, MutableMapping) else enumerate(container)
        for key, value in pairs:
            if isinstance(key, str) and key in left_out:
                continue
            self._values.append((container, key, value))
            if isinstance(value, torch.Tensor):
                self._versions.append((value, value._version))
            elif depth and isinstance(value, dict | list | tuple):
                self._note(value, depth - 1)
            elif depth and type(value).__name__.endswith("Processor"):
                self._note(vars(value), depth - 1)


def _get(container: Any, key: Any) -> Any:
    if isinstance(container, MutableMapping):
        return container.get(key, _MISSING)
    return container[key]
