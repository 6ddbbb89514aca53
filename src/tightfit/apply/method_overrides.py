"""Methods and properties that override a component's own while it follows a plan."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tightfit.apply.activations.exported.compiled import CompiledProgram
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.apply.activations.exported.program import exported_forward
from tightfit.files import cache_folder
from tightfit.measure.module_equivalence import OVERRIDDEN
from tightfit.schema.plan import ComponentPlan

__all__ = ["computing", "exported", "override_class_members", "own_class", "while_followed"]


def exported(module: nn.Module, plan: ComponentPlan) -> dict[str, Any]:
    """Return the `forward` that runs the plan's exported file in place of `module`'s own, by name; else nothing."""
    if plan.exported is None:
        return {}
    exported_file = ExportedFile.load(Path(plan.exported))
    compiled = CompiledProgram(exported_file, cache_folder() / "compiled") if plan.compiled else None
    return {"forward": exported_forward(module, exported_file, compiled)}


def while_followed(
    run: Callable[..., Any], method: str, over: Callable[[], bool], lock: contextlib.AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Wrap `run`, the override of an object's `method`; once `over()` is true, it calls the class's own method instead.

    Other code keeps references to such methods to wrap them: `decode = vae.decode; vae.decode = lambda z: decode(z)`.
    A call holds `lock`: meanwhile no other thread makes the object follow another plan.
    """

    @functools.wraps(run)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return (getattr(type(self), method) if over() else run)(self, *args, **kwargs)

    return called


def computing(method: Callable[..., Any], dtype: str, args: Any, kwargs: Any) -> Any:
    """Call `method` with floating-point tensors in `dtype`; return results in the dtype of the first of them."""
    compute, given = getattr(torch, dtype), []

    def narrow(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            given.append(value.dtype)
            return value.to(compute)
        return value

    def widen(value: Any) -> Any:
        return value.to(given[0]) if given and isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(narrow, (args, kwargs))
    return tree_map(widen, method(*args, **kwargs))


def own_class(target: object) -> type:
    """Return the class of `target` without what overrides its members."""
    return getattr(type(target), OVERRIDDEN, type(target))


def override_class_members(target: object, original: type | None = None, /, **members: Any) -> Callable[[], None]:
    """Make `target` an instance of a subclass of its class with these members; return how to revert that.

    With an `original` class it replaces an earlier override, and `target` is no instance of its own class in between.
    """
    original = original or type(target)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    object.__setattr__(target, "__class__", _metaclass(original)(original.__name__, (original,), names | members))
    held = weakref.ref(target)  # so that undoing does not keep a pipeline alive

    def reveal() -> None:
        if (alive := held()) is not None:
            object.__setattr__(alive, "__class__", original)

    return reveal


def _metaclass(original: type) -> type:
    """Metaclass of classes that equal the class whose members they override, and others that override its members.

    diffusers looks types up in lists when pipelines share components; blocks are counted by their classes. Calling such
    a class, as in `type(pipe)(**pipe.components)`, makes an instance of the class itself, which follows no plan.
    """
    plain = getattr(original, OVERRIDDEN, original)

    def equal(cls: type, other: object) -> bool:
        return getattr(other, OVERRIDDEN, other) is plain

    def instance(_: type, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    members = {"__eq__": equal, "__hash__": lambda cls: hash(plain), "__call__": instance, OVERRIDDEN: plain}
    return type("OverridingType", (type(original),), members)
