"""`device_map` and `max_memory`, as users of diffusers and accelerate write them → the target of a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias, get_args

import torch

from tightfit.devices.choose import KINDS, choose_device
from tightfit.devices.cuda_support import usable_cards
from tightfit.devices.device import Device
from tightfit.errors import InputError, PlanError, unknown_name
from tightfit.plan.planner import SPARE, SPARE_LEAST
from tightfit.run.limits import Limits
from tightfit.run.plan_target import PlanTarget, plan_target_of
from tightfit.schema.device_map import DeviceMap, Strategy
from tightfit.schema.machine import Budget
from tightfit.schema.plan import check_techniques
from tightfit.schema.stores import STORES
from tightfit.units import parse_bytes

__all__ = ["DeviceMapLike", "MaxMemory", "refuse_beside_map", "target_of_map"]

DeviceName: TypeAlias = str | int | torch.device  # 1 is "cuda:1"
DeviceMapLike: TypeAlias = DeviceName | Mapping[str, DeviceName] | None
MaxMemory: TypeAlias = Mapping[DeviceName, str | int] | None

ALL = ""  # the name that stands for all components that are not named
_STRATEGIES: tuple[str, ...] = get_args(Strategy)


def refuse_beside_map(device_map: DeviceMapLike, max_memory: MaxMemory, **others: object) -> None:
    """Raise PlanError if `others`, arguments of `fit` that say the same by name, are given beside a device map."""
    given = [f"{name}={value!r:.60}" for name, value in others.items() if value is not None]
    if given:
        maps = {"device_map": device_map, "max_memory": max_memory}
        said = " and ".join(f"{name}={value!r:.60}" for name, value in maps.items() if value is not None)
        raise PlanError(f"{said} say which devices are used, and how much of them: leave out {', '.join(given)}")


def target_of_map(
    device_map: DeviceMapLike,
    max_memory: MaxMemory,
    allow: Sequence[str],
    names: Collection[str],
    own_bytes: Callable[[Device], int] = lambda device: 0,
) -> PlanTarget:
    """Return what to plan for: devices and limits for a pipeline whose networks are called `names`.

    `device_map` is "auto", "balanced", one device, or a mapping of components to devices, "cpu" or "disk" (see
    `tightfit.fit`); `max_memory` has bytes by device. Devices that it does not name are not used. `own_bytes` of a
    device are taken by the pipeline's weights, and are free for the plan.

    Raises PlanError and InputError for unknown names, for devices that contradict each other, and if no device is left.
    """
    memory = _memory_of(max_memory)
    strategy, fixed = _fixed_places(device_map, names)
    if device_map is None or device_map in _STRATEGIES or _is_store(device_map) or isinstance(device_map, Mapping):
        cards = _usable(device_map, fixed, names, memory)
    else:
        cards = _single(device_map, memory)
    _check_named(fixed, cards)
    limits = Limits(None, check_techniques(allow))
    if limits.may_choose_cache:
        said = device_map if max_memory is None else max_memory
        raise PlanError(f"allow=step-cache goes with a budget for one device, not with a map: {said!r:.60}")
    limits = limits._replace(device_map=DeviceMap(strategy=strategy, components=fixed, ignored=memory.ignored))
    if len(cards) < 2:
        size = memory.cards.get(cards[0]) if cards else None
        budget = None if size is None and memory.ram is None else Budget(device=size, ram=memory.ram)
        return plan_target_of(limits._replace(budget=budget), cards[0] if cards else "cpu")
    devices = [choose_device(card) for card in cards]
    sizes = {each.name: memory.cards.get(each.name) or _free(each, own_bytes(each)) for each in devices}
    return plan_target_of(limits._replace(budget=Budget(devices=sizes, ram=memory.ram)), None)


class _MaxMemory(NamedTuple):
    """What `max_memory` says."""

    given: bool
    cards: Mapping[str, int]  # bytes of those that exist and may be used, by name
    ram: int | None  # bytes of host memory; None: not limited
    ignored: tuple[str, ...]

    @property
    def named(self) -> str:
        return ", ".join([*self.cards, *["cpu"] * (self.ram is not None)]) or "none that can be used"


def _memory_of(max_memory: MaxMemory) -> _MaxMemory:
    cards: dict[str, int] = {}
    ram, ignored = None, []
    for key, said in (max_memory or {}).items():
        size = 0 if said in (0, "0") else parse_bytes(said)
        if (name := _name_of(key)) == "cpu":
            ram = max(size, 1)
        elif (existing := _existing(name)) is None:
            ignored.append(name)
        elif existing in cards:
            raise PlanError(f"max_memory names {existing} twice: {list(max_memory or ())}")
        else:
            cards[existing] = size
    return _MaxMemory(max_memory is not None, {name: size for name, size in cards.items() if size}, ram, tuple(ignored))


def _name_of(key: object) -> str:
    """Return the name of a device that is given by its number, its name, or as torch's."""
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return f"cuda:{key}"
    if isinstance(key, str | torch.device):
        return str(key)
    raise InputError(f"{key!r} is no device: write 0 for cuda:0, or a name such as 'cuda:0' or 'cpu'")


def _existing(name: str) -> str | None:
    """Return the full name of the device called `name`; None if this computer has none that can be used."""
    try:
        return choose_device(name).name
    except InputError:
        if name.partition(":")[0] in KINDS:
            return None
        try:
            torch.device(name)
        except RuntimeError:
            raise InputError(unknown_name("device in max_memory", name, KINDS[:-1]), name=name) from None
        return None


def _fixed_places(device_map: DeviceMapLike, names: Collection[str]) -> tuple[Strategy, dict[str, str]]:
    """Return the strategy, and the card or store ("cpu", "disk") of each component that is fixed."""
    if device_map == "balanced":
        return "balanced", {}
    if _is_store(device_map):
        return "auto", dict.fromkeys(names, str(device_map))
    if not isinstance(device_map, Mapping):
        return "auto", {}
    for name in device_map:
        if name != ALL and name not in names:
            whole = next((each for each in names if str(name).startswith(f"{each}.")), None)
            if whole is not None:
                raise PlanError(f"device_map names {name}, but {whole} computes on one device as a whole: name that")
            raise PlanError(unknown_name("component in device_map", str(name), names), name=str(name))
    places = {name: device_map.get(name, device_map.get(ALL)) for name in names}
    return "auto", {name: _place(place) for name, place in places.items() if place is not None}


def _is_store(device_map: DeviceMapLike) -> bool:
    """Whether it names a store of all weights: "disk" does, and "cpu" is the device that computes."""
    return isinstance(device_map, str) and device_map in STORES and not STORES[device_map].is_host_memory


def _place(place: DeviceName) -> str:
    name = _name_of(place)
    return name if name in STORES else choose_device(name).name


def _usable(
    device_map: DeviceMapLike, fixed: Mapping[str, str], names: Collection[str], memory: _MaxMemory
) -> list[str]:
    """Return the cards on which components may compute; none if the CPU computes."""
    if memory.given:
        if not memory.cards and memory.ram is None:
            ignored = f"max_memory leaves no device: there is no {' or '.join(memory.ignored) or 'device in it'}"
            raise PlanError(f"{ignored} on this computer; 'cpu' in it would do", devices=list(memory.ignored))
        return list(memory.cards)
    if cards := [place for place in fixed.values() if place not in STORES]:
        return list(dict.fromkeys(cards))
    if isinstance(device_map, Mapping) and len(fixed) == len(names):  # all of it in host memory, or on the disk
        return []
    if isinstance(device_map, Mapping) or _is_store(device_map):
        return _cards(choose_device(None))
    return [f"cuda:{index}" for index in usable_cards()]


def _single(device_map: DeviceName, memory: _MaxMemory) -> list[str]:
    """Return the one card that `device_map` is; none if it is the CPU."""
    name = _name_of(device_map)
    if name.partition(":")[0] not in KINDS:
        known = *_STRATEGIES, *filter(_is_store, STORES), *KINDS[:-1]
        raise InputError(unknown_name("device_map", name, known), name=name)
    device = choose_device(name)
    if memory.given and device.name not in memory.cards and (_cards(device) or memory.ram is None):
        raise PlanError(f"device_map={device.name}, but max_memory leaves that out: it names {memory.named}")
    return _cards(device)


def _cards(device: Device) -> list[str]:
    return [] if device.kind == "cpu" else [device.name]


def _check_named(fixed: Mapping[str, str], cards: Collection[str]) -> None:
    """Raise PlanError if a component has to compute on a card that may not be used."""
    for name, place in fixed.items():
        if place not in STORES and place not in cards:
            named = ", ".join(cards) or "no card"
            raise PlanError(
                f"device_map has {name} on {place}, but max_memory leaves that out: it names {named}", name=name
            )


def _free(card: Device, own: int) -> int:
    """Return the bytes that all tensors of this process may take of `card` if nothing else is said."""
    free = card.free_bytes() + own
    least = SPARE_LEAST if card.kind == "cuda" else 0
    others = max((card.allocated_bytes() or 0) - own, 0)
    return max(free - max(int(free * SPARE), least), 1) + others
