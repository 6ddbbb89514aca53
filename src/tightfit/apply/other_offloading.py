"""Refuse pipelines whose weights others move, where that cannot be replaced: two cannot move the same weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from tightfit.apply.replaced_offloading import group_offloading, is_replaceable, moving_parts, own_device_map
from tightfit.errors import AlreadyFitted, PlanError
from tightfit.measure.modules import HANDLE, find_components

__all__ = ["refuse_followers", "refuse_offloaded"]


def refuse_offloaded(pipe: Any, *, measured: bool = False, replaced: bool = True) -> None:
    """Raise PlanError where others move weights of `pipe`; the message says how to end that.

    Device maps and offloading from host memory are refused only if they will not be `replaced` (by
    `replaced_offloading.replaced`). Layerwise casting is refused if calls are `measured` beforehand: in a copy of the
    pipeline its hooks would call the original.
    """
    if not replaced and own_device_map(pipe):
        raise PlanError(f"this pipeline has a device map: call {_call('reset_device_map')} first")
    for name, module in find_components(pipe).items():
        if measured and _casts_layers(module):
            raise PlanError(
                f"{name} casts its layers in each pass (layerwise casting), which cannot be measured for a budget: "
                "load the pipeline anew without it; allow=['fp8'] stores weights in eight bits",
                name=name,
            )
        if replaced and is_replaceable(module):
            continue
        if group_offloading(module) is not None:
            raise PlanError(
                f"{name} is offloaded by groups, which diffusers has no call to end: load the pipeline anew, without "
                "enable_group_offload() or apply_group_offloading()",
                name=name,
            )
        if moving_parts(module):
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


def _casts_layers(module: nn.Module) -> bool:
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    return any("layerwise_casting" in getattr(registry, "hooks", ()) for registry in registries)
