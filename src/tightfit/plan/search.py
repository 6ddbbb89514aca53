"""All combinations of what can be done about each component and of how the autoencoder works: the best of them.

Which there are depends on no budget. So more budget is never slower, and what a smaller budget accepts a larger one
does too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.forecast import ALTERNATIONS, more_seconds, most_weights, needed_bytes, way_of
from tightfit.plan.options import Menu, Option, Where, options_of, why_there
from tightfit.plan.parts import SEGMENT
from tightfit.records import Accelerator, Component, Footprint, Reason, Storage, VaePlan

__all__ = ["Found", "Search"]

_ALL = 2**60


class _Crew(NamedTuple):
    """Components that are on the device together, and the phases in which they are."""

    names: tuple[str, ...]
    phases: tuple[int, ...]


class Found(NamedTuple):
    """A combination, the better the less."""

    seconds: float
    peak: int
    ram: int
    options: tuple[tuple[str, Option], ...]
    vae: VaePlan


@dataclass
class Search:
    """The combinations for one way of storing components."""

    footprint: Footprint
    device: Accelerator
    disk_rate: float | None
    storages: Mapping[str, Storage]
    _menus: dict[tuple[str, Where], Menu] = field(default_factory=dict, init=False)

    def best(self, size: int, ram: int | None) -> Found | None:
        """The best within `size` bytes of the device and `ram` of host memory (None: as many as wanted), if any."""
        return min(self._fitting(size, ram), key=lambda found: found[:3], default=None)

    def least(self, ram: int | None) -> int | None:
        """The fewest bytes of the device with which anything fits; None if nothing ever does."""
        return _fewest(lambda size: self.best(size, ram) is not None)

    def least_ram(self, size: int) -> int | None:
        """The same of host memory."""
        return _fewest(lambda ram: self.best(size, ram) is not None)

    def reasons(self, found: Found, size: int) -> Iterator[Reason]:
        """Why weights are where they are."""
        rooms = self._rooms(found.vae)
        options = dict(found.options)
        always = self._idle + sum(option.always for option in options.values())
        for crew in self._crews:
            number = max(crew.phases, key=lambda number: rooms[number])
            phase, left = self.footprint.phases[number].name, most_weights(size, rooms[number], self.device) - always
            for name in crew.names:
                yield why_there(self._component(name), options[name], self._menu(name, "resident"), left, phase)

    def most_room(self, vae: VaePlan) -> int:
        """Bytes that activations want of an allocator at the most."""
        return max(self._rooms(vae))

    def _rooms(self, vae: VaePlan) -> list[int]:
        """The same, phase by phase."""
        ways = [way_of(phase, vae) for phase in self.footprint.phases]
        return [way.room if way else phase.room for way, phase in zip(ways, self.footprint.phases, strict=True)]

    def _component(self, name: str) -> Component:
        return next(component for component in self.footprint.components if component.name == name)

    def _fitting(self, size: int, ram: int | None) -> Iterator[Found]:
        used = [name for crew in self._crews for name in crew.names]
        wheres: tuple[Where, ...] = ("resident", "host", "disk")
        if self.device.is_cpu:  # host memory is its own
            wheres = ("resident", "disk")
        elif ram is None:
            wheres = ("resident", "host")
        for vae in self._vaes:
            ways, rooms = [way_of(phase, vae) for phase in self.footprint.phases], self._rooms(vae)
            waiting = max(way.host if way else 0 for way in ways)
            longer = sum(more_seconds(way, self.device) for way in ways)
            for chosen in itertools.product(wheres, repeat=len(used)):
                found = self._combined(dict(zip(used, chosen, strict=True)), rooms, size)
                if found is not None and (ram is None or found.ram + waiting <= ram):
                    yield found._replace(seconds=found.seconds + longer, vae=vae)

    def _combined(self, wheres: Mapping[str, Where], rooms: Sequence[int], size: int) -> Found | None:
        """The best within `size` with components where they are said to be, and so much for activations by phases."""
        always = self._idle + sum(self._menu(name, where).always for name, where in wheres.items())
        options: dict[str, Option] = {}
        peak = 0
        for crew in self._crews:
            room = max(rooms[number] for number in crew.phases)
            menus = [self._menu(name, wheres[name]) for name in crew.names]
            chosen = _fastest(menus, most_weights(size, room, self.device) - always)
            if chosen is None:
                return None
            options |= zip(crew.names, chosen, strict=True)
            peak = max(peak, needed_bytes(always + sum(option.comes for option in chosen), room, self.device))
        ram = sum(option.ram for option in options.values())
        seconds = sum(option.seconds for option in options.values())
        return Found(seconds, peak, ram, tuple(options.items()), VaePlan())

    @cached_property
    def _vaes(self) -> list[VaePlan]:
        """How autoencoders can work; the same in all phases."""
        ways = {(way.strips, way.maps) for phase in self.footprint.phases for way in phase.ways}
        if self.device.is_cpu:
            ways = {(strips, maps) for strips, maps in ways if maps == "device"}
        return [VaePlan(), *(VaePlan(strips=strips, maps=maps) for strips, maps in sorted(ways))]

    @cached_property
    def _idle(self) -> int:
        """Bytes that are there of components which never work."""
        used = {name for crew in self._crews for name in crew.names}
        idle = [component for component in self.footprint.components if component.name not in used]
        return sum(self._menu(component.name, "disk").always for component in idle)

    @cached_property
    def _crews(self) -> list[_Crew]:
        """Who takes turns more often than a few times is there together with the others."""
        order = [phase.passes[index].component for phase in self.footprint.phases for index in phase.order]
        turns = Counter(frozenset(pair) for pair in itertools.pairwise(order) if pair[0] != pair[1])
        crews = {name: {name} for name in order}
        for pair, count in turns.items():
            if count > ALTERNATIONS:
                together = set().union(*(crews[name] for name in pair))
                crews |= dict.fromkeys(together, together)
        distinct = {frozenset(crew): tuple(sorted(crew, key=order.index)) for crew in crews.values()}
        return [_Crew(names, self._phases_of(names)) for names in distinct.values()]

    def _phases_of(self, names: tuple[str, ...]) -> tuple[int, ...]:
        phases = enumerate(self.footprint.phases)
        return tuple(number for number, phase in phases if {p.component for p in phase.passes}.intersection(names))

    def _menu(self, name: str, where: Where) -> Menu:
        """Worked out when it is asked for: who never reads from the disk need not know how long that takes."""
        if (name, where) not in self._menus:
            storage: Storage = self.storages.get(name, "as-loaded")
            options = options_of(self._component(name), self.footprint, self.device, where, self.disk_rate, storage)
            self._menus[name, where] = Menu(options)
        return self._menus[name, where]


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The fewest whole segments of bytes that are `enough`; None if no number is."""
    most = 1
    while not enough(most * SEGMENT):
        most *= 2
        if most * SEGMENT > _ALL:
            return None
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle * SEGMENT) else (middle, most)
    return most * SEGMENT


def _fastest(menus: Sequence[Menu], most: int) -> tuple[Option, ...] | None:
    """One option of each, `most` bytes together, that are fastest; None if nothing fits."""
    if not menus:
        return () if most >= 0 else None
    if len(menus) == 1:
        option = menus[0].within(most)
        return None if option is None else (option,)
    together = ((first, _fastest(menus[1:], most - first.comes)) for first in menus[0])
    fitting = [(first, *others) for first, others in together if others is not None]
    return min(fitting, key=lambda options: sum(option.seconds for option in options), default=None)
