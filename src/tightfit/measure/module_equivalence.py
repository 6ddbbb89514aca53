"""Finds modules that do the same work for equal inputs: same layers, same sizes, same arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import ViewSpec, store_of

__all__ = [
    "COMPARABLE",
    "OVERRIDDEN",
    "REPEATS",
    "ModuleEquivalence",
    "call_signature",
    "input_layouts",
    "is_own",
    "is_simulated",
]


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# attributes of a module that are compared separately, or are equal for all
_ELSEWHERE = (frozenset(vars(nn.Module())) | {"forward", "_diffusers_hook"}) - {"training"}
_KNOWN = ("torch.", "diffusers.", "transformers.")  # libraries whose objects are determined by their attributes
COMPARABLE = (bool, int, float, str, torch.dtype, type(None))  # plain inputs and outputs of equivalent blocks
OVERRIDDEN = "_tightfit_overridden"  # attribute of classes that override members of a class: that class
REPEATS = "repeats_blocks"  # attribute of functions that replace a block's forward and have the same effect


class ModuleEquivalence:
    """Assigns equal numbers to equivalent modules; each module is inspected once.

    A module with third-party hooks, or with a replaced forward, is equivalent to none: their state is unknown.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._modules: dict[int, int] = {}
        self._kept: list[Any] = []  # objects compared by id, kept alive so that the id is not reused

    def of(self, module: nn.Module) -> int:
        known = self._modules.get(id(module))
        if known is None:
            self._modules[id(module)] = -1  # for modules that contain themselves
            known = self._modules[id(module)] = self._number(self._module(module))
        return known

    def is_as_before(self, module: nn.Module) -> bool:
        """Whether `module` is unchanged since it was numbered."""
        now = ModuleEquivalence()
        now._numbers, now._kept = self._numbers, self._kept
        return now.of(module) == self.of(module)

    def _number(self, signature: Hashable) -> int:
        return self._numbers.setdefault(signature, len(self._numbers))

    def _module(self, module: nn.Module) -> Hashable:
        own = vars(module)
        if _is_followed(own):
            return "module", id(module)
        children = tuple((name, self.of(child)) for name, child in own["_modules"].items() if child is not None)
        tensors = ((name, self._value(each)) for name, each in (*own["_parameters"].items(), *own["_buffers"].items()))
        others = ((name, self._value(each)) for name, each in own.items() if name not in _ELSEWHERE)
        return self._type(type(module)), children, tuple(tensors), tuple(others)

    def _type(self, kind: type) -> Hashable:
        """A key of the class; an overriding class (see `override_class_members`) is compared by its overrides."""
        changes: list[Hashable] = []
        while hasattr(kind, OVERRIDDEN):
            members = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
            changes += [(name, self._value(value)) for name, value in members]
            kind = kind.__mro__[1]
        return (id(kind), *changes)

    def _value(self, value: Any) -> Hashable:
        signature: Hashable
        match value:
            case _ if isinstance(value, _PLAIN):
                signature = type(value), value
            case torch.Tensor():
                signature = tuple(value.shape), value.stride(), value.dtype, value.device
            case nn.Module():
                signature = "module", self.of(value)
            case list() | tuple() | set() | frozenset():
                signature = type(value), tuple(map(self._value, value))
            case dict():
                signature = type(value), tuple((self._value(key), self._value(each)) for key, each in value.items())
            case functools.partial():
                signature = "partial", self._value(value.func), self._value(value.args), self._value(value.keywords)
            case types.MethodType():
                signature = "method", self._value(value.__func__), self._value(value.__self__)
            case types.FunctionType():
                signature = self._function(value)
            case _ if type(value).__module__.startswith(_KNOWN) and hasattr(value, "__dict__"):
                signature = type(value), self._value(vars(value))
            case _:
                self._kept.append(value)
                signature = "object", id(value)
        return signature

    def _function(self, function: types.FunctionType) -> Hashable:
        """A key of the code and the closure; for this package's functions, without state cached by the first call."""
        own = is_own(function)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        signature = [self._value(each) for each in cells if each is not function and not (own and _is_memory(each))]
        return "function", function.__code__, tuple(signature)


def _is_followed(own: Mapping[str, Any]) -> bool:
    """Whether a module with these attributes has hooks, or a replaced forward, that are not tightfit's."""
    hooks = (hook for kind in _HOOKS for hook in own[kind].values())
    stands_in = own.get("forward")
    return (
        not all(map(is_own, hooks))
        or (stands_in is not None and not hasattr(stands_in, REPEATS))
        or bool(getattr(own.get("_diffusers_hook"), "hooks", None))
    )


def is_own(function: Any) -> bool:
    """Whether the function is defined in this package, even if it wraps another one."""
    function = function.func if isinstance(function, functools.partial) else function
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("tightfit.")


def _is_memory(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def call_signature(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """A hashable key of a call's arguments; of tensors only shape and dtype."""
    layers, structure = tree_flatten((args, kwargs))
    shapes = ((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in layers)
    return (str(structure), *shapes)


def is_simulated(value: Any) -> bool:
    """Whether it is a plain torch.Tensor on a simulated card."""
    return type(value) is torch.Tensor and value.device.type == NAME


def input_layouts(given: Sequence[Any]) -> tuple[Any, ...] | None:
    """A key of a block's inputs that is equal for equivalent inputs; None where an input cannot be compared."""
    storages: dict[int, int] = {}
    found: list[Any] = []
    for value in given:
        if is_simulated(value):
            store = store_of(value)
            same = storages.setdefault(store.address, len(storages))
            numbers = store.fill if store.values is None else store.address  # a tensor with values equals only itself
            found.append((same, store.values is None, numbers, ViewSpec.of(value)))
        elif isinstance(value, COMPARABLE):
            found.append((type(value), value))
        else:
            return None
    return tuple(found)
