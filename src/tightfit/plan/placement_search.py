"""Search over all combinations of each component's options and of ways to run the autoencoder.

It is one part of a device's search: denoisers run as one variant. Which combinations exist depends on no budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.component_order import CoResidentGroup, calls_per_load, co_resident_groups
from tightfit.plan.eight_bits import allocator_bytes_by_phase
from tightfit.plan.forecast import most_weights, needed_bytes
from tightfit.plan.option_search import BestOptionSearch, Option, OptionSet, fastest_combination
from tightfit.plan.options import (
    RESIDENT,
    WHOLE,
    ComponentWorkload,
    SearchCache,
    WeightLocation,
    WorkloadKey,
    placement_reason,
)
from tightfit.schema.footprint import Footprint, StripProfile, Variant
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Reason, Storage, VaePlan
from tightfit.schema.stores import STORES, StoreRates

__all__ = ["SearchNode", "Solution", "VariantSearch"]

_ENDLESS = 2**63  # bytes: no limit in effect, where one must be given


class _WeightLocations(NamedTuple):
    """Where each component's weights are, and the fewest bytes that this takes."""

    locations: Mapping[str, WeightLocation]
    weights: tuple[int, ...]  # bytes on the device, while each co-resident group runs
    ram: int  # bytes of host memory for offloaded weights


class Solution(NamedTuple):
    """The best combination for given weight locations, with its cost: less is better."""

    seconds: float
    peak: int  # reserved bytes of the device
    ram: int  # bytes of host memory for offloaded weights
    options: tuple[tuple[str, Option], ...]  # by component
    vae: VaePlan
    variant_search: VariantSearch  # the search that found it


class SearchNode(NamedTuple):
    """Given weight locations and a way to run the autoencoder, with what the search has found of them so far."""

    searches: tuple[BestOptionSearch, ...]  # one for each component
    vae: VaePlan
    locations: Mapping[str, WeightLocation]
    ram: int  # bytes of host memory for offloaded weights and feature maps
    variant_search: VariantSearch

    @property
    def lower_bound(self) -> float:
        """Lower bound in seconds; infinite if nothing fits."""
        return sum(search.seconds for search in self.searches)

    @property
    def undecided(self) -> BestOptionSearch | None:
        """The component search to continue next; None if the best option of each component alone is known."""
        return next((search for search in self.searches if not search.done), None)


@dataclass
class VariantSearch:
    """Search over the combinations for components stored as `storages` says, with denoisers run as in `footprint`.

    If it is the search of a `variant`, the `base` search has the results of all other components; None: it is that.
    """

    footprint: Footprint
    device: Accelerator
    store_rates: StoreRates
    storages: Mapping[str, Storage]
    variant: Variant | None = None
    base: VariantSearch | None = None
    cache: SearchCache = field(default_factory=SearchCache)
    fixed: Mapping[str, WeightLocation] = field(default_factory=dict)  # where weights have to be, by component
    # by whether RAM is limited
    _placements_by_limit: dict[bool, list[_WeightLocations]] = field(default_factory=dict, init=False)

    def reasons(self, found: Solution, size: int) -> Iterator[Reason]:
        """Yield why the weights of each component are where `found` has them, within `size` bytes of the device."""
        allocator_bytes = self._allocator_bytes[found.vae]
        options = dict(found.options)
        always = self._idle_bytes + sum(option.always for option in options.values())
        for group in self._groups:
            number = max(group.phases, key=lambda number: allocator_bytes[number])
            phase = self.footprint.phases[number].name
            free_bytes = most_weights(size, allocator_bytes[number], self.device) - always
            for name in group.names:
                yield placement_reason(self.workload(name), options[name], free_bytes, phase, found.vae)

    def max_allocator_bytes(self, vae: VaePlan) -> int:
        """Return the most bytes that any phase needs of an allocator for activations and widened weights."""
        return max(self._allocator_bytes[vae])

    @cached_property
    def _allocator_bytes(self) -> dict[VaePlan, list[int]]:
        """Bytes that each phase needs of an allocator, for each way to run autoencoders."""
        return {vae: allocator_bytes_by_phase(self.footprint, vae, self.storages) for vae in self._vae_plans}

    def _strip_profiles(self, vae: VaePlan) -> list[StripProfile | None]:
        return [vae.strip_profile(phase) for phase in self.footprint.phases]

    def workload(self, name: str) -> ComponentWorkload:
        """Return the workload of the component `name`."""
        if self.base is not None and name not in self.footprint.denoisers:
            return self.base.workload(name)
        key = self._workload_keys[name]
        if key not in self.cache.workloads:
            component = next(component for component in self.footprint.components if component.name == name)
            base = None if self.base is None else self.base.workload(name)
            self.cache.workloads[key] = ComponentWorkload(component, self.footprint, self.device, base)
        return self.cache.workloads[key]

    @cached_property
    def _workload_keys(self) -> dict[str, WorkloadKey]:
        """Cache key of each component: how often it is loaded depends on the other components on this device."""
        loads = calls_per_load(self.footprint)
        return {
            component.name: (component.name, loads.get(component.name, ())) for component in self.footprint.components
        }

    def nodes(self, size: int, ram: int | None) -> Iterator[SearchNode]:
        """Yield a node for all that fits `size` bytes of the device and `ram` of host memory (None: unlimited)."""
        for vae in self._vae_plans:
            map_ram = self._map_ram(vae)
            for placed, needed in self._feasible_placements(vae, ram):
                if needed <= size:
                    searches = tuple(self._option_searches(placed.locations, vae, size))
                    yield SearchNode(searches, vae, placed.locations, placed.ram + map_ram, self)

    def ram_of(self, found: Solution) -> int:
        """Return the bytes of host memory for offloaded weights and feature maps."""
        return found.ram + self._map_ram(found.vae)

    def _map_ram(self, vae: VaePlan) -> int:
        """Return the bytes of host memory for feature maps."""
        return max((profile.host_bytes for profile in self._strip_profiles(vae) if profile), default=0)

    def min_bytes(self, ram: int | None) -> int | None:
        """Return the fewest bytes of the device with which anything fits; None if nothing ever does."""
        sizes = (needed for vae in self._vae_plans for _, needed in self._feasible_placements(vae, ram))
        return min(sizes, default=None)

    def tightest_phases(self, size: int, ram: int | None) -> Iterator[str]:
        """Yield the phases that need all of `size` bytes in the combinations that just fit them."""
        for vae, allocator_bytes in self._allocator_bytes.items():
            just = [placed for placed, needed in self._feasible_placements(vae, ram) if needed == size]
            yield from (
                self.footprint.phases[number].name
                for placed in just
                for group, weights in zip(self._groups, placed.weights, strict=True)
                for number in group.phases
                if needed_bytes(weights, allocator_bytes[number], self.device) == size
            )

    def min_ram(self, size: int) -> int | None:
        """Return the fewest bytes of host memory with which anything fits `size` device bytes; None if nothing does."""
        fitting = (
            placed.ram + self._map_ram(vae)
            for vae in self._vae_plans
            for placed, needed in self._feasible_placements(vae, _ENDLESS)
            if needed <= size
        )
        return min(fitting, default=None)

    def _feasible_placements(self, vae: VaePlan, ram: int | None) -> Iterator[tuple[_WeightLocations, int]]:
        """Yield the weight locations possible within `ram`, each with the fewest bytes of the device that it needs."""
        allocator_bytes, map_ram = self._allocator_bytes[vae], self._map_ram(vae)
        group_bytes = [max(allocator_bytes[number] for number in group.phases) for group in self._groups]
        for placed in self._placements(limited=ram is not None):
            if ram is None or placed.ram + map_ram <= ram:
                whole = max(map(sum, zip(placed.weights, group_bytes, strict=True)), default=0)
                yield placed, needed_bytes(whole, 0, self.device)

    def _placements(self, *, limited: bool) -> list[_WeightLocations]:
        """Return all possible weight locations; others than host memory are only tried where that is `limited`."""
        if limited not in self._placements_by_limit:
            on_cpu = self.device.is_cpu  # whose memory is RAM
            stores = (n for n, kind in STORES.items() if (not on_cpu if kind.is_host_memory else limited or on_cpu))
            locations = [RESIDENT, *stores]
            names = [name for group in self._groups for name in group.names]
            chosen = itertools.product(*([self.fixed[n]] if n in self.fixed else locations for n in names))
            found = (self._placement(dict(zip(names, each, strict=True))) for each in chosen)
            self._placements_by_limit[limited] = [placement for placement in found if placement is not None]
        return self._placements_by_limit[limited]

    def _placement(self, locations: Mapping[str, WeightLocation]) -> _WeightLocations | None:
        """Return the least bytes of these locations; None if some component has no option for its own."""
        always, weights = self._always(locations), []
        for group in self._groups:
            min_bytes = [self._min_bytes(name, locations[name]) for name in group.names]
            if None in min_bytes:
                return None
            weights.append(always + sum(size or 0 for size in min_bytes))
        offloaded = (self._ram_bytes(name, location) for name, location in locations.items())
        return _WeightLocations(locations, tuple(weights), sum(offloaded))

    def _min_bytes(self, name: str, location: WeightLocation) -> int | None:
        """Return the fewest bytes loaded for a component; None if it has no option at `location`."""
        if self.base is not None and name not in self.footprint.denoisers:
            return self.base._min_bytes(name, location)
        key = self._workload_keys[name], location
        if key not in self.cache.min_bytes:
            storage: Storage = self.storages.get(name, "as-loaded")
            self.cache.min_bytes[key] = self.workload(name).min_bytes(location, storage, self.variant)
        return self.cache.min_bytes[key]

    def find(self, node: SearchNode, size: int) -> Solution | None:
        """Return the best solution of a node; None if nothing fits."""
        return self._best_solution(node.locations, node.vae, size)

    def _always(self, locations: Mapping[str, WeightLocation]) -> int:
        """Return the bytes of weights that are on the device in all phases."""
        return self._idle_bytes + sum(
            self.workload(name).always(remains=location == RESIDENT) for name, location in locations.items()
        )

    def _free_bytes(
        self, locations: Mapping[str, WeightLocation], vae: VaePlan, size: int
    ) -> Iterator[tuple[CoResidentGroup, int, int]]:
        """Yield for each co-resident group its activation bytes, and the bytes of `size` left for weights it loads."""
        always, allocator_bytes = self._always(locations), self._allocator_bytes[vae]
        for group in self._groups:
            activation_bytes = max(allocator_bytes[number] for number in group.phases)
            yield group, activation_bytes, most_weights(size, activation_bytes, self.device) - always

    def _option_searches(
        self, locations: Mapping[str, WeightLocation], vae: VaePlan, size: int
    ) -> Iterator[BestOptionSearch]:
        """Yield the search for the best option of each component alone."""
        for group, _, free_bytes in self._free_bytes(locations, vae, size):
            for name in group.names:
                yield self._option_set(name, locations[name], vae).search(free_bytes)

    def _best_solution(self, locations: Mapping[str, WeightLocation], vae: VaePlan, size: int) -> Solution | None:
        """Return the best solution within `size` bytes for given weight locations and autoencoders run as in `vae`."""
        always, peak = self._always(locations), 0
        options: dict[str, Option] = {}
        for group, activation_bytes, free_bytes in self._free_bytes(locations, vae, size):
            option_sets = [self._option_set(name, locations[name], vae) for name in group.names]
            chosen = fastest_combination(option_sets, free_bytes)
            if chosen is None:
                return None
            options |= zip(group.names, chosen, strict=True)
            weights = always + sum(option.streamed_bytes for option in chosen)
            peak = max(peak, needed_bytes(weights, activation_bytes, self.device))
        ram = sum(option.ram for option in options.values())
        return Solution(sum(each.seconds for each in options.values()), peak, ram, tuple(options.items()), vae, self)

    @cached_property
    def _vae_plans(self) -> list[VaePlan]:
        """Ways to run autoencoders; each applies to all phases."""
        profiles = (profile for phase in self.footprint.phases for profile in phase.strip_options)
        options = {(profile.strip_bytes, profile.feature_maps) for profile in profiles}
        if self.device.is_cpu:
            options = {(strips, maps) for strips, maps in options if maps == "device"}
        return [VaePlan(), *(VaePlan(strips=strips, feature_maps=maps) for strips, maps in sorted(options))]

    @cached_property
    def _idle_bytes(self) -> int:
        """Bytes on the device of components that never run."""
        used = {name for group in self._groups for name in group.names}
        idle = [component for component in self.footprint.components if component.name not in used]
        return sum(self.workload(each.name).always(remains=not each.has_forward) for each in idle)

    @cached_property
    def _groups(self) -> list[CoResidentGroup]:
        return co_resident_groups(self.footprint)

    def _option_set(self, name: str, location: WeightLocation, vae: VaePlan) -> OptionSet:
        """Return a component's options, computed on demand."""
        if self.base is not None and name not in self.footprint.denoisers:
            return self.base._option_set(name, location, vae)
        how = vae if self.workload(name).component.role == "autoencoder" else WHOLE
        key = self._workload_keys[name], location, how
        if key not in self.cache.option_sets:
            storage: Storage = self.storages.get(name, "as-loaded")
            workload = self.workload(name)
            self.cache.option_sets[key] = workload.option_set(location, self.store_rates, storage, self.variant, how)
        return self.cache.option_sets[key]

    def _ram_bytes(self, name: str, location: WeightLocation) -> int:
        """Return the bytes of RAM for the weights of the component `name` at `location`."""
        size, ranks = self.workload(name).component.bytes, self.device.ranks_sharing_weights
        return 0 if location == RESIDENT else STORES[location].ram_bytes(size, ranks)
