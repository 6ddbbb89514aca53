"""Refuse pipelines that diffusers, accelerate or another plan offload already: two cannot move the same weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from tightfit.errors import AlreadyFitted, PlanError
from tightfit.measure.modules import HANDLE, find_components

__all__ = ["refuse_followers", "refuse_offloaded"]

_MOVES = {"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"}  # accelerate's hooks that move weights


def refuse_offloaded(pipe: Any, *, measured: bool = False) -> None:
    """Raise PlanError where other hooks move the weights of `pipe`; the message says how to remove them.

    Hooks that cast layers are refused too, if calls are `measured` beforehand: in a copy they use the original's.

    Otherwise they would move weights that a plan places, or diffusers would register them again after a call.
    """
    if getattr(pipe, "hf_device_map", None) and not isinstance(pipe, nn.Module):
        raise PlanError(f"this pipeline was loaded with a device map: call {_call('reset_device_map')} first")
    for name, module in find_components(pipe).items():
        if measured and _hooked(module, "layerwise_casting"):
            raise PlanError(
                f"{name} casts its layers in each pass (layerwise casting), which cannot be measured for a budget: "
                "load the pipeline anew without it; allow=['fp8'] stores weights in eight bits",
                name=name,
            )
        if _hooked(module, "group_offloading"):
            raise PlanError(
                f"{name} is offloaded by groups, which diffusers has no call to end: load the pipeline anew, without "
                "enable_group_offload() or apply_group_offloading()",
                name=name,
            )
        if any(_moves(getattr(part, "_hf_hook", None)) for part in module.modules()):
            remove = (
                _call("remove_all_hooks")
                if hasattr(pipe, "remove_all_hooks")
                else (f"accelerate.hooks.remove_hook_from_module({name}, recurse=True)")
            )
            raise PlanError(f"{name} is offloaded by accelerate's hooks: call {remove} first", name=name)


def refuse_followers(pipe: Any, handle: object) -> None:
    """Raise AlreadyFitted where a component of `pipe` follows a plan of another handle than `handle`."""
    for name, module in find_components(pipe).items():
        if getattr(module, HANDLE, handle) is not handle:
            raise AlreadyFitted(
                f"{name} already follows the plan of another pipeline: undo() that one first", name=name
            )


def _call(method: str) -> str:
    return f"pipe.{method}()"


def _hooked(module: nn.Module, hook: str) -> bool:
    """Whether diffusers has added a `hook` of that name to a part of `module`."""
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    return any(hook in getattr(registry, "hooks", ()) for registry in registries)


def _moves(hook: Any) -> bool:
    """Whether an accelerate hook moves weights; some hooks are lists of others."""
    kinds = {kind.__name__ for kind in type(hook).__mro__}
    return bool(kinds & _MOVES) or any(_moves(each) for each in getattr(hook, "hooks", ()))
