"""Whether a pipeline still has the components that its plan was applied to."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from tightfit.measure.modules import find_components

__all__ = ["PipelineState"]


class PipelineState:
    """The components of `pipe` now: which modules they are, and the bytes of their parameters."""

    def __init__(self, pipe: Any) -> None:
        # weak, so that a replaced component can go
        self._parts = {name: (weakref.ref(part), _size(part)) for name, part in find_components(pipe).items()}

    def changes(self, pipe: Any, *, sizes: bool) -> list[str]:
        """Return what is different now, a few words each; with `sizes`, also of components with other parameters."""
        found, now = [], find_components(pipe)
        for name, (module, size) in self._parts.items():
            if name not in now:
                found.append(f"{name} was removed")
            elif module() is not now[name]:
                found.append(f"{name} was replaced")
            elif sizes and size != _size(now[name]):
                found.append(f"{name} has other weights")
        return found + [f"{name} was added" for name in now if name not in self._parts]


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
