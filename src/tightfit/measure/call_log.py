"""The passes of a real call, to be repeated without weights: which component was given what, in shapes.

So a call can be measured that cannot be rehearsed: what lies between its passes (code that looks at numbers, uses
NumPy, or decides from an output how many steps follow) has happened by then, and is not repeated. A network whose own
code cannot do without numbers is not repeated as a whole, but what it called, part by part.
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

__all__ = ["LoggedPass", "PassLog"]

FOLLOWED = 2  # passes of one kind, of which the parts are logged: the first may make what the others find


@dataclass
class LoggedPass:
    """A component, or a part of one, at work once."""

    component: str
    method: str  # "forward", "encode", "decode"; the path of a part
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    waiting: int  # bytes of activations on the device when it began, these arguments included
    parts: list[LoggedPass] = field(default_factory=list)  # that it called

    def given(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments, those that were on the call's device on `device`."""
        given: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda value: value.on(device) if isinstance(value, _Shape) else value, (self.args, self.kwargs)
        )
        return given

    def of(self, components: Mapping[str, nn.Module]) -> Callable[..., Any]:
        """What is called to do it again, of these `components`."""
        module = components[self.component]
        if self.method == "forward":
            return module
        return getattr(module, self.method, None) or module.get_submodule(self.method)


@dataclass(frozen=True)
class _Shape:
    """A tensor of the call's device."""

    like: torch.Tensor  # on "meta", or small and with its numbers

    def on(self, device: torch.device) -> torch.Tensor:
        if not self.like.is_meta:
            return self.like.to(device)
        return torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device=device)


class PassLog:
    """Follows one call that computes on `device`; `activations` says how many bytes of them are there."""

    def __init__(self, device: torch.device, activations: Callable[[], int]) -> None:
        self._device, self._activations = device, activations
        self.passes: list[LoggedPass] = []
        self._known: dict[Any, list[LoggedPass]] = {}  # passes whose parts are logged, by their kind
        self._open: list[LoggedPass] = []  # what is at work, the innermost last, where its parts are logged
        self._alone: tuple[str, str] | None = None  # a component and its part, which is called by itself

    def add(self, component: str, method: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """`component` begins to work."""
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
        """Logs the parts of passes until `undo` is closed. A part that is called by itself is a pass."""
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

    def _logged(self, component: str, method: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> LoggedPass:
        positional, named = tree_map(self._shape_of, (tuple(args), dict(kwargs)))
        return LoggedPass(component, method, positional, named, self._activations())

    def _shape_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, str | bytes | int | float | None) else _without_tensors(value)
        value, here = value.detach(), value.device == self._device
        if value.numel() > LARGE:
            return _Shape(torch.empty_like(value, device="meta")) if here else value.clone()
        like = value.to("cpu", copy=True)
        return _Shape(like) if here else like


def _without_tensors(value: Any) -> Any:
    """A copy of an object that is no container, in which large tensors are shapes; itself where nobody can copy it."""
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    shapes = {
        id(item): torch.empty_like(item, device="meta")
        for item in inside
        if isinstance(item, torch.Tensor) and item.numel() > LARGE
    }
    try:
        return copy.deepcopy(value, shapes)
    except Exception:  # of anybody's code
        return value
