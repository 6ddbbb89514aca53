"""Refuse pipelines that diffusers or accelerate offload already: two libraries cannot move the same weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from tightfit.errors import PlanError
from tightfit.measure.modules import find_components

__all__ = ["refuse_offloaded"]

_MOVES = {"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"}  # accelerate's hooks that move weights


def refuse_offloaded(pipe: Any) -> None:
    """Raise PlanError where other hooks move the weights of `pipe`; the message says how to remove them.

    Otherwise they would move weights that a plan places, or diffusers would register them again after a call.
    """
    if getattr(pipe, "hf_device_map", None) and not isinstance(pipe, nn.Module):
        raise PlanError(f"this pipeline was loaded with a device map: call {_call('reset_device_map')} first")
    for name, module in find_components(pipe).items():
        if _by_groups(module):
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


def _call(method: str) -> str:
    return f"pipe.{method}()"


def _by_groups(module: nn.Module) -> bool:
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    return any("group_offloading" in getattr(registry, "hooks", ()) for registry in registries)


def _moves(hook: Any) -> bool:
    """Whether an accelerate hook moves weights; some hooks are lists of others."""
    kinds = {kind.__name__ for kind in type(hook).__mro__}
    return bool(kinds & _MOVES) or any(_moves(each) for each in getattr(hook, "hooks", ()))
