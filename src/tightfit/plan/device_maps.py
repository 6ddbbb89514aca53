"""A user's device map → what it fixes in a search, and what a plan says about it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tightfit.errors import PlanError
from tightfit.plan.options import RESIDENT
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan, Reason
from tightfit.schema.stores import STORES

__all__ = ["check_cards", "fixed_locations", "on_whole_calls", "with_device_map"]


def check_cards(device_map: DeviceMap | None, devices: Collection[str]) -> None:
    """Raise PlanError if `device_map` lets a component compute on none of the `devices` of a plan."""
    for name, card in (device_map.cards if device_map else {}).items():
        if card not in devices:
            raise PlanError(f"{name} cannot compute on {card}: the plan is for {', '.join(devices)}", device=card)


def fixed_locations(device_map: DeviceMap | None, footprint: Footprint, device: Accelerator) -> dict[str, str]:
    """Return where the weights of components have to be on `device`, by name, as far as `device_map` says it.

    Weights that a pipeline reads itself stay on the device. On a CPU, host memory is the device's own.
    """
    stores = {} if device_map is None else device_map.stores
    movable = {component.name for component in footprint.components if component.has_forward}
    return {
        name: RESIDENT if device.is_cpu and STORES[store].is_host_memory else store
        for name, store in stores.items()
        if name in movable
    }


def on_whole_calls(footprint: Footprint, cards: Mapping[str, str]) -> Footprint:
    """Return `footprint` without what applies to all denoisers, or all autoencoders, where `cards` separate these.

    That is variants of denoisers, and autoencoders in strips: those of one plan are the same for all of them.
    """
    if _separated(footprint, cards, "denoiser"):
        footprint = footprint.model_copy(update={"variants": ()})
    if _separated(footprint, cards, "autoencoder"):
        phases = tuple(phase.model_copy(update={"strip_options": ()}) for phase in footprint.phases)
        footprint = footprint.model_copy(update={"phases": phases})
    return footprint


def _separated(footprint: Footprint, cards: Mapping[str, str], role: str) -> bool:
    names = [component.name for component in footprint.components if component.role == role]
    return len({cards[name] for name in names if name in cards}) > 1


def with_device_map(plan: Plan, device_map: DeviceMap | None) -> Plan:
    """Return `plan` as one for `device_map`, with reasons for what that fixes and for what is ignored in it."""
    if device_map is None:
        return plan
    reasons = (*plan.reasons, *_reasons(plan, device_map))
    return plan.model_copy(update={"device_map": device_map, "reasons": reasons})


def _reasons(plan: Plan, device_map: DeviceMap) -> Iterator[Reason]:
    for name in device_map.ignored:
        because = "max_memory names it, and it is no device that can be used on this computer"
        yield Reason(decision=f"{name} is ignored", because=because)
    fixed = DeviceMap(components={k: v for k, v in device_map.components.items() if k in plan.components})
    if fixed.components:
        yield Reason(decision=fixed.described, because="device_map says so")
