"""`hf_device_map` and `reset_device_map()` of a pipeline that was fitted with a device map."""

from __future__ import annotations

from typing import Any, Protocol

from tightfit.devices.choose import choose_device
from tightfit.measure.modules import find_blocks, find_components, has_skips
from tightfit.plan.network_parts import block_order, part_finder
from tightfit.schema.plan import ComponentPlan, Plan

__all__ = ["device_map_members", "hf_device_map"]


class _Undoable(Protocol):
    plan: Plan

    def undo(self) -> None: ...


def device_map_members(handle: _Undoable, original: type, plan: Plan) -> dict[str, Any]:
    """Return members of a pipeline of the class `original` that follows `plan`: none if that has no device map."""
    if plan.device_map is None:
        return {}

    def reset_device_map(self: Any) -> None:
        """Undo the plan; then move all components to the CPU, and drop the device map that was there before it."""
        handle.undo()
        if hasattr(original, "reset_device_map"):
            original.reset_device_map(self)
        for module in find_components(self).values():
            module.to("cpu")

    where = property(lambda self: hf_device_map(handle.plan, self))
    return {"hf_device_map": where, "reset_device_map": reset_device_map}


def hf_device_map(plan: Plan, pipe: object) -> dict[str, int | str]:
    """Return where the weights of each component of `pipe` are by `plan` while no component runs, as diffusers does.

    That is the number of a CUDA card, or the name of another device, on which a component is resident; else "cpu" or
    "disk", from which it is loaded onto the device on which it computes. Modules of later parts of a split
    component have entries of their own ("transformer.blocks.5").
    """
    where: dict[str, int | str] = {}
    for name, module in find_components(pipe).items():
        chosen = plan.components.get(name, ComponentPlan())
        (own, first), *later = plan.parts_of(name).items()
        where[name] = _place(first, own)
        order = block_order(find_blocks(module), has_skips=has_skips(module)) if later else []
        part_of = part_finder(order, chosen.split.values())
        for path in (*order, *(path for part in chosen.split.values() for path in part.outside)):
            if index := part_of(path):
                device, part = later[index - 1]
                where[f"{name}.{path}"] = _place(part, device)
    return where


def _place(chosen: ComponentPlan, device_name: str) -> int | str:
    if chosen.placement != "resident":
        return chosen.offload_to
    device = choose_device(device_name)
    return device.torch_device.index if device.kind == "cuda" else device.name
