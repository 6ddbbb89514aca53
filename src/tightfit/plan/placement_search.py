"""Search over all combinations of each component's options and of ways to run the autoencoder.

It is one branch of a device's search: denoisers run as one variant. Which combinations exist depends on no budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.component_order import CoResidencyTracker, visits
from tightfit.plan.eight_bits import allocator_bytes_by_phase
from tightfit.plan.forecast import most_weights, needed_bytes
from tightfit.plan.option_search import BestOptionSearch, Option, OptionSet
from tightfit.plan.options import RESIDENT, WHOLE, ComponentWorkload, SearchCache, Visitor, WeightLocation, why_there
from tightfit.schema.footprint import Footprint, StripProfile, Variant
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Reason, Storage, VaePlan
from tightfit.schema.stores import STORES, StoreRates

__all__ = ["SearchNode", "Solution", "VariantSearch"]

_ENDLESS = 2**63  # bytes: no limit in effect, where one must be given


class _CoResidentGroup(NamedTuple):
    """Components that are on the device together, and the indices of the phases in which they are."""

    names: tuple[str, ...]
    phases: tuple[int, ...]


class _WeightLocations(NamedTuple):
    """Where each component's weights are, and the fewest bytes that this takes."""

    wheres: Mapping[str, WeightLocation]
    weights: tuple[int, ...]  # bytes on the device, while each co-resident group runs
    ram: int  # bytes of host memory for offloaded weights


class Solution(NamedTuple):
    """The best combination for given weight locations, with its cost: less is better."""

    seconds: float
    peak: int  # reserved bytes of the device
    ram: int  # bytes of host memory for offloaded weights
    options: tuple[tuple[str, Option], ...]  # by component
    vae: VaePlan
    branch: VariantSearch  # the search that found it


class SearchNode(NamedTuple):
    """Given weight locations and a way to run the autoencoder, with what the search has found of them so far."""

    searches: tuple[BestOptionSearch, ...]  # one for each component
    vae: VaePlan
    wheres: Mapping[str, WeightLocation]
    ram: int  # bytes of host memory for offloaded weights and feature maps
    branch: VariantSearch

    @property
    def lower_bound(self) -> float:
        """Lower bound in seconds; infinite if nothing fits."""
        return sum(race.seconds for race in self.searches)

    @property
    def undecided(self) -> BestOptionSearch | None:
        """The component search to continue next; None if the best option of each component alone is known."""
        return next((race for race in self.searches if not race.over), None)


@dataclass
class VariantSearch:
    """Search over the combinations for components stored as `storages` says, with denoisers run as in `footprint`.

    If it is the search of a `variant`, the `usual` search has the results of all other components; None: it is that.
    """

    footprint: Footprint
    device: Accelerator
    store_rates: StoreRates
    storages: Mapping[str, Storage]
    variant: Variant | None = None
    usual: VariantSearch | None = None
    known: SearchCache = field(default_factory=SearchCache)
    _placed: dict[bool, list[_WeightLocations]] = field(default_factory=dict, init=False)  # by whether RAM is limited

    def reasons(self, found: Solution, size: int) -> Iterator[Reason]:
        """Yield why the weights of each component are where `found` has them, within `size` bytes of the device."""
        rooms = self._rooms[found.vae]
        options = dict(found.options)
        always = self._idle + sum(option.always for option in options.values())
        for crew in self._groups:
            number = max(crew.phases, key=lambda number: rooms[number])
            phase, left = self.footprint.phases[number].name, most_weights(size, rooms[number], self.device) - always
            for name in crew.names:
                yield why_there(self.task(name), options[name], left, phase, found.vae)

    def most_room(self, vae: VaePlan) -> int:
        """Return the most bytes that any phase needs of an allocator for activations and widened weights."""
        return max(self._rooms[vae])

    @cached_property
    def _rooms(self) -> dict[VaePlan, list[int]]:
        """Bytes that each phase needs of an allocator, for each way to run autoencoders."""
        return {vae: allocator_bytes_by_phase(self.footprint, vae, self.storages) for vae in self._vaes}

    def _ways(self, vae: VaePlan) -> list[StripProfile | None]:
        return [vae.strip_profile(phase) for phase in self.footprint.phases]

    def task(self, name: str) -> ComponentWorkload:
        """Return the workload of the component `name`."""
        if self.usual is not None and name not in self.footprint.denoisers:
            return self.usual.task(name)
        visitor = self._visitors[name]
        if visitor not in self.known.tasks:
            component = next(component for component in self.footprint.components if component.name == name)
            usual = None if self.usual is None else self.usual.task(name)
            self.known.tasks[visitor] = ComponentWorkload(component, self.footprint, self.device, usual)
        return self.known.tasks[visitor]

    @cached_property
    def _visitors(self) -> dict[str, Visitor]:
        """Cache key of each component: how often it is loaded depends on the other components on this device."""
        known = visits(self.footprint)
        return {
            component.name: (component.name, known.get(component.name, ())) for component in self.footprint.components
        }

    def nodes(self, size: int, ram: int | None) -> Iterator[SearchNode]:
        """Yield a node for all that fits `size` bytes of the device and `ram` of host memory (None: unlimited)."""
        for vae in self._vaes:
            waiting = self._waiting(vae)
            for placed, needed in self._needed(vae, ram):
                if needed <= size:
                    searches = tuple(self._races(placed.wheres, vae, size))
                    yield SearchNode(searches, vae, placed.wheres, placed.ram + waiting, self)

    def ram_of(self, found: Solution) -> int:
        """Return the bytes of host memory for offloaded weights and feature maps."""
        return found.ram + self._waiting(found.vae)

    def _waiting(self, vae: VaePlan) -> int:
        """Return the bytes of host memory for feature maps."""
        return max((way.host_bytes for way in self._ways(vae) if way), default=0)

    def least(self, ram: int | None) -> int | None:
        """Return the fewest bytes of the device with which anything fits; None if nothing ever does."""
        return min((needed for vae in self._vaes for _, needed in self._needed(vae, ram)), default=None)

    def tightest(self, size: int, ram: int | None) -> Iterator[str]:
        """Yield the phases that need all of `size` bytes in the combinations that just fit them."""
        for vae, rooms in self._rooms.items():
            just = [placed for placed, needed in self._needed(vae, ram) if needed == size]
            yield from (
                self.footprint.phases[number].name
                for placed in just
                for crew, weights in zip(self._groups, placed.weights, strict=True)
                for number in crew.phases
                if needed_bytes(weights, rooms[number], self.device) == size
            )

    def least_ram(self, size: int) -> int | None:
        """Return the fewest bytes of host memory with which anything fits `size` device bytes; None if nothing does."""
        fitting = (
            placed.ram + self._waiting(vae)
            for vae in self._vaes
            for placed, needed in self._needed(vae, _ENDLESS)
            if needed <= size
        )
        return min(fitting, default=None)

    def _needed(self, vae: VaePlan, ram: int | None) -> Iterator[tuple[_WeightLocations, int]]:
        """Yield the weight locations possible within `ram`, each with the fewest bytes of the device that it needs."""
        rooms, waiting = self._rooms[vae], self._waiting(vae)
        wanted = [max(rooms[number] for number in crew.phases) for crew in self._groups]
        for placed in self._placements(limited=ram is not None):
            if ram is None or placed.ram + waiting <= ram:
                whole = max(map(sum, zip(placed.weights, wanted, strict=True)), default=0)
                yield placed, needed_bytes(whole, 0, self.device)

    def _placements(self, *, limited: bool) -> list[_WeightLocations]:
        """Return all possible weight locations; stores that take no RAM are only tried where that is `limited`."""
        if limited not in self._placed:
            on_cpu = self.device.is_cpu  # whose memory is RAM
            stores = (n for n, kind in STORES.items() if (not on_cpu if kind.in_ram else limited or on_cpu))
            wheres = [RESIDENT, *stores]
            names = [name for crew in self._groups for name in crew.names]
            chosen = itertools.product(wheres, repeat=len(names))
            found = (self._placement(dict(zip(names, each, strict=True))) for each in chosen)
            self._placed[limited] = [placement for placement in found if placement is not None]
        return self._placed[limited]

    def _placement(self, wheres: Mapping[str, WeightLocation]) -> _WeightLocations | None:
        """Return the least bytes of these locations; None if some component has no option for its own."""
        always, weights = self._always(wheres), []
        for crew in self._groups:
            leasts = [self._least(name, wheres[name]) for name in crew.names]
            if None in leasts:
                return None
            weights.append(always + sum(least or 0 for least in leasts))
        masters = (self.task(name).component.bytes for name, where in wheres.items() if _in_ram(where))
        return _WeightLocations(wheres, tuple(weights), sum(masters))

    def _least(self, name: str, where: WeightLocation) -> int | None:
        """Return the fewest bytes loaded for a component; None if it has no option at `where`."""
        if self.usual is not None and name not in self.footprint.denoisers:
            return self.usual._least(name, where)
        key = self._visitors[name], where
        if key not in self.known.leasts:
            storage: Storage = self.storages.get(name, "as-loaded")
            self.known.leasts[key] = self.task(name).least(where, storage, self.variant)
        return self.known.leasts[key]

    def find(self, chance: SearchNode, size: int) -> Solution | None:
        """Return the best solution of a node; None if nothing fits."""
        return self._combined(chance.wheres, chance.vae, size)

    def _always(self, wheres: Mapping[str, WeightLocation]) -> int:
        """Return the bytes of weights that are on the device in all phases."""
        return self._idle + sum(self.task(name).always(remains=where == RESIDENT) for name, where in wheres.items())

    def _left(
        self, wheres: Mapping[str, WeightLocation], vae: VaePlan, size: int
    ) -> Iterator[tuple[_CoResidentGroup, int, int]]:
        """Yield for each co-resident group its activation bytes, and the bytes of `size` left for weights it loads."""
        always, rooms = self._always(wheres), self._rooms[vae]
        for crew in self._groups:
            room = max(rooms[number] for number in crew.phases)
            yield crew, room, most_weights(size, room, self.device) - always

    def _races(self, wheres: Mapping[str, WeightLocation], vae: VaePlan, size: int) -> Iterator[BestOptionSearch]:
        """Yield the search for the best option of each component alone."""
        for crew, _, left in self._left(wheres, vae, size):
            for name in crew.names:
                yield self._options(name, wheres[name], vae).search(left)

    def _combined(self, wheres: Mapping[str, WeightLocation], vae: VaePlan, size: int) -> Solution | None:
        """Return the best solution within `size` bytes for given weight locations and autoencoders run as in `vae`."""
        always, peak = self._always(wheres), 0
        options: dict[str, Option] = {}
        for crew, room, left in self._left(wheres, vae, size):
            chosen = _fastest([self._options(name, wheres[name], vae) for name in crew.names], left)
            if chosen is None:
                return None
            options |= zip(crew.names, chosen, strict=True)
            peak = max(peak, needed_bytes(always + sum(option.streamed_bytes for option in chosen), room, self.device))
        ram = sum(option.ram for option in options.values())
        seconds = sum(option.seconds for option in options.values())
        return Solution(seconds, peak, ram, tuple(options.items()), vae, self)

    @cached_property
    def _vaes(self) -> list[VaePlan]:
        """Ways to run autoencoders; each applies to all phases."""
        ways = {(way.strip_bytes, way.feature_maps) for phase in self.footprint.phases for way in phase.strip_options}
        if self.device.is_cpu:
            ways = {(strips, maps) for strips, maps in ways if maps == "device"}
        return [VaePlan(), *(VaePlan(strips=strips, feature_maps=maps) for strips, maps in sorted(ways))]

    @cached_property
    def _idle(self) -> int:
        """Bytes on the device of components that never run."""
        used = {name for crew in self._groups for name in crew.names}
        idle = [component for component in self.footprint.components if component.name not in used]
        return sum(self.task(each.name).always(remains=not each.has_forward) for each in idle)

    @cached_property
    def _groups(self) -> list[_CoResidentGroup]:
        """Groups of components that are on the device together."""
        order = [phase.calls[index].component for phase in self.footprint.phases for index in phase.call_order]
        tracker = CoResidencyTracker()
        for name in order:
            tracker.record_run(name)
        crews = {name: {name} for name in order}
        for pair in tracker.pairs:
            together = set().union(*(crews[name] for name in pair))
            crews |= dict.fromkeys(together, together)
        distinct = {frozenset(crew): tuple(sorted(crew, key=order.index)) for crew in crews.values()}
        return [_CoResidentGroup(names, self._phases_of(names)) for names in distinct.values()]

    def _phases_of(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the phases in which any of `names` runs, or no component of this device: what is loaded remains."""
        workers = [{done.component for done in phase.calls} for phase in self.footprint.phases]
        return tuple(number for number, there in enumerate(workers) if there.intersection(names) or not there)

    def _options(self, name: str, where: WeightLocation, vae: VaePlan) -> OptionSet:
        """Return a component's options, computed on demand."""
        if self.usual is not None and name not in self.footprint.denoisers:
            return self.usual._options(name, where, vae)
        how = vae if self.task(name).component.role == "autoencoder" else WHOLE
        key = self._visitors[name], where, how
        if key not in self.known.menus:
            storage: Storage = self.storages.get(name, "as-loaded")
            self.known.menus[key] = self.task(name).menu(where, self.store_rates, storage, self.variant, how)
        return self.known.menus[key]


def _in_ram(where: WeightLocation) -> bool:
    return where != RESIDENT and STORES[where].in_ram


def _fastest(menus: Sequence[OptionSet], most: int) -> tuple[Option, ...] | None:
    """Return the fastest choice of one option from each set, at most `most` bytes together; None if nothing fits."""
    if not menus:
        return () if most >= 0 else None
    if len(menus) == 1:
        option = menus[0].within(most)
        return None if option is None else (option,)
    together = ((first, _fastest(menus[1:], most - first.streamed_bytes)) for first in menus[0])
    fitting = [(first, *others) for first, others in together if others is not None]
    return min(fitting, key=lambda options: sum(option.seconds for option in options), default=None)
