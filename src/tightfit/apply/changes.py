"""Whether a pipeline still is what its plan was applied to."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from tightfit.measure.modules import find_components

__all__ = ["PipelineState"]

_FLAGS = ("use_slicing", "use_tiling")  # of diffusers' autoencoders


class PipelineState:
    """The components of `pipe` now: which modules they are, the bytes of their parameters, and what was switched."""

    def __init__(self, pipe: Any) -> None:
        # weak, so that a replaced component can go
        self._parts = {
            name: (weakref.ref(part), _size(part), _switches(part)) for name, part in find_components(pipe).items()
        }
        self._attention_backend = _attention_backend()

    def changes(self, pipe: Any, *, measured: bool) -> list[str]:
        """Return what is different now, a few words each; with `measured`, also what changes a component's memory."""
        found, now = [], find_components(pipe)
        for name, (module, size, switches) in self._parts.items():
            if name not in now:
                found.append(f"{name} was removed")
            elif module() is not now[name]:
                found.append(f"{name} was replaced")
            elif measured and size != _size(now[name]):
                found.append(f"{name} has other weights")
            elif measured and switches != _switches(now[name]):
                found.append(f"{name} has other settings")
        if measured and (backend := _attention_backend()) != self._attention_backend:
            found.append(f"diffusers' attention backend is {backend}")
        return found + [f"{name} was added" for name in now if name not in self._parts]


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _switches(module: nn.Module) -> list[Any]:
    """Return what diffusers' methods switch in `module`: attention processors and backends, caches, tiling, slicing."""
    found: list[Any] = [vars(module).get(flag) for flag in _FLAGS]
    for part in module.modules():
        own = vars(part)
        if (processor := own.get("processor")) is not None:
            found.append((type(processor), getattr(processor, "_attention_backend", None)))
        if (registry := own.get("_diffusers_hook")) is not None:
            found += registry.hooks
    return found


def _attention_backend() -> str | None:
    """Return diffusers' attention backend for all models of the process that have none of their own."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    backend = getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_active_backend", None)
    return getattr(backend, "value", backend)
