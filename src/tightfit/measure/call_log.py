"""The component calls of a real pipeline call, logged to be repeated without weights: the arguments of each, as shapes.

So a call can be measured that cannot be simulated: the code between component calls (which reads values, uses NumPy, or
chooses the number of steps by an output) has run by then, and is not repeated. A network whose own code needs values is
not repeated as a whole, but its submodule calls one by one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tightfit.measure.build_models import LARGE
from tightfit.measure.module_equivalence import call_signature

__all__ = ["CallLog", "LoggedCall"]

FOLLOWED = 2  # calls of one kind whose submodule calls are logged: the first may fill caches that the others use


@dataclass
class LoggedCall:
    """One call of a component or of a submodule."""

    component: str
    method: str  # "forward", "encode", "decode"; or the path of a submodule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    waiting: int  # bytes of activations on the device at its start, these arguments included
    parts: list[LoggedCall] = field(default_factory=list)  # submodule calls made by it

    def given(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return its arguments, with those that were on the call's device on `device`."""
        given: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda value: value.on(device) if isinstance(value, _Shape) else value, (self.args, self.kwargs)
        )
        return given

    def of(self, components: Mapping[str, nn.Module]) -> Callable[..., Any]:
        """Return the module or method of these `components` to call to repeat it."""
        module = components[self.component]
        if self.method == "forward":
            return module
        return getattr(module, self.method, None) or module.get_submodule(self.method)


@dataclass(frozen=True)
class _Shape:
    """A tensor on the call's device."""

    like: torch.Tensor  # on "meta", or small and with its values

    def on(self, device: torch.device) -> torch.Tensor:
        if not self.like.is_meta:
            return self.like.to(device)
        return torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device=device)


class CallLog:
    """Logs one pipeline call that computes on `device`; `activations` returns the bytes of activations there."""

    def __init__(self, device: torch.device, activations: Callable[[], int]) -> None:
        self._device, self._activations = device, activations
        self.passes: list[LoggedCall] = []
        self._known: dict[Any, list[LoggedCall]] = {}  # component calls whose submodule calls are logged, by kind
        self._open: list[LoggedCall] = []  # the calls in progress, the innermost last, where submodule calls are logged
        self._alone: tuple[str, str] | None = None  # component and submodule that the pipeline calls directly

    def add(self, component: str, method: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Log a call of `component` that begins now."""
        done = self._logged(component, method, args, kwargs)
        kind = component, method, call_signature(args, kwargs)
        known = self._known.setdefault(kind, [])
        if len(known) < FOLLOWED:
            known.append(done)
            self._open = [done]
        else:
            done.parts, self._open = known[-1].parts, []
        self.passes.append(done)

    def follow(self, components: Mapping[str, nn.Module], at_work: Callable[[str], bool], undo: ExitStack) -> None:
        """Log submodule calls until `undo` is closed. One made directly by the pipeline is a call of its own."""
        for name, module in components.items():
            for path, part in module.named_modules():
                if path and part._compiled_call_impl is None:
                    begin = functools.partial(self._begin, name, path, at_work)
                    undo.callback(part.register_forward_pre_hook(begin, with_kwargs=True).remove)
                    end = functools.partial(self._end, name, path)
                    undo.callback(part.register_forward_hook(end, always_call=True).remove)

    def _begin(
        self, name: str, path: str, at_work: Callable[[str], bool], _: nn.Module, args: Any, kwargs: Any
    ) -> None:
        if self._alone is None and not at_work(name):
            self._alone = name, path
            self.add(name, path, args, kwargs)
        elif self._open and self._open[0].component == name:
            part = self._logged(name, path, args, kwargs)
            self._open[-1].parts.append(part)
            self._open.append(part)

    def _end(self, name: str, path: str, *_: Any) -> None:
        if self._alone == (name, path):
            self._alone = None
        elif len(self._open) > 1 and self._open[-1].method == path:
            self._open.pop()

    def _logged(self, component: str, method: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> LoggedCall:
        positional, named = tree_map(self._shape_of, (tuple(args), dict(kwargs)))
        return LoggedCall(component, method, positional, named, self._activations())

    def _shape_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, str | bytes | int | float | None) else _without_tensors(value)
        value, here = value.detach(), value.device == self._device
        if value.numel() > LARGE:
            return _Shape(torch.empty_like(value, device="meta")) if here else value.clone()
        like = value.to("cpu", copy=True)
        return _Shape(like) if here else like


def _without_tensors(value: Any) -> Any:
    """Copy an object that is no container, with large tensors as shapes; return it itself if it cannot be copied."""
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    shapes = {
        id(item): torch.empty_like(item, device="meta")
        for item in inside
        if isinstance(item, torch.Tensor) and item.numel() > LARGE
    }
    try:
        return copy.deepcopy(value, shapes)
    except Exception:  # raised by third-party code
        return value
