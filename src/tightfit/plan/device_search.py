"""Search over all options of one device: each variant of the denoisers, with all combinations of everything else.

Which options there are does not depend on a budget. So a larger budget is never slower, and what fits a smaller one
fits a larger one too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

from tightfit.plan.options import SearchCache, WeightLocation
from tightfit.plan.placement_search import SearchNode, Solution, VariantSearch
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Storage
from tightfit.schema.stores import StoreRates

__all__ = ["DeviceSearch", "ParetoFront", "Storages", "storages_of"]

Storages = Mapping[str, Storage]


class ParetoFront:
    """Fastest solutions for every amount of host memory up to a limit, searched most promising first."""

    def __init__(self, nodes: Iterable[SearchNode], size: int, *, minimize_ram: bool) -> None:
        """Solutions fit `size` bytes of the device; without `minimize_ram` only the fastest is kept."""
        self._nodes: list[tuple[float, int, SearchNode]] = []
        self._size, self._minimize_ram = size, minimize_ram
        self._best: list[Solution] = []
        for number, node in enumerate(nodes):
            self._push(number, node)

    @property
    def lower_bound(self) -> float:
        """Lower bound of all solutions in seconds, as far as known; infinite if nothing fits."""
        left = self._nodes[0][0] if self._nodes else math.inf
        return min([left, *(found.seconds for found in self._best)])

    @property
    def done(self) -> bool:
        """Whether all nodes have been searched."""
        return not self._nodes

    def within(self, seconds: float) -> list[Solution]:
        """Return all solutions of at most `seconds`, and some slower ones: each slower than the last, with less RAM."""
        while self._nodes and self._nodes[0][0] <= seconds:
            _, number, node = heapq.heappop(self._nodes)
            if any(self._dominates(found, node) for found in self._best):
                continue
            if node.undecided is None:
                found = node.variant_search.find(node, self._size)
                self._best = self._best if found is None else self._pareto_optimal([*self._best, found])
            else:
                node.undecided.step()
                self._push(number, node)
        return self._best

    def _push(self, number: int, node: SearchNode) -> None:
        """Add a node if anything fits; of equally promising ones, that of the lowest number is searched first."""
        if node.lower_bound < math.inf:
            heapq.heappush(self._nodes, (node.lower_bound, number, node))

    def _pareto_optimal(self, solutions: Iterable[Solution]) -> list[Solution]:
        """Return the solutions that no other one matches in both time and RAM; if RAM does not count, the fastest."""
        kept: list[Solution] = []
        for found in sorted(
            solutions, key=lambda found: (found.seconds, found.peak, found.variant_search.ram_of(found))
        ):
            if not kept or (
                self._minimize_ram and found.variant_search.ram_of(found) < kept[-1].variant_search.ram_of(kept[-1])
            ):
                kept.append(found)
        return kept

    def _dominates(self, found: Solution, node: SearchNode) -> bool:
        if self._minimize_ram:
            return found.seconds <= node.lower_bound and found.variant_search.ram_of(found) <= node.ram
        return found.seconds < node.lower_bound


class DeviceSearch:
    """Options of `device` for the call that `footprint` describes, with components stored as `storages` says."""

    def __init__(
        self,
        footprint: Footprint,
        device: Accelerator,
        store_rates: StoreRates,
        storages: Storages,
        caches: dict[int, SearchCache] | None = None,
        fixed: Mapping[str, WeightLocation] = MappingProxyType({}),
    ) -> None:
        """`caches` has earlier results for the same call on devices of equal speed, by variant number (0: usual).

        `fixed` says where weights have to be, by component.
        """
        self.footprint, self.device, self.store_rates = footprint, device, store_rates
        self._storages, self._caches = storages, {} if caches is None else caches
        self._fixed = fixed

    @cached_property
    def variant_searches(self) -> list[VariantSearch]:
        """The search for the usual variant, and one for each other variant."""
        common = self.device, self.store_rates, self._storages
        caches = [self._caches.setdefault(number, SearchCache()) for number in range(len(self.footprint.variants) + 1)]
        base = VariantSearch(self.footprint, *common, cache=caches[0], fixed=self._fixed)
        others = zip(self.footprint.variants, caches[1:], strict=True)
        return [
            base,
            *(
                VariantSearch(self.footprint.with_variant(other), *common, other, base, cache, self._fixed)
                for other, cache in others
            ),
        ]

    def best(self, size: int, ram: int | None) -> Solution | None:
        """Return the best within `size` bytes of the device and `ram` of host memory (None: unlimited), if any."""
        return next(iter(self.front(size, ram, minimize_ram=False).within(math.inf)), None)

    def front(self, size: int, ram: int | None, *, minimize_ram: bool) -> ParetoFront:
        """Return the Pareto front within `size` device and `ram` host bytes (None: unlimited), by `minimize_ram`."""
        nodes = (node for variant_search in self.variant_searches for node in variant_search.nodes(size, ram))
        return ParetoFront(nodes, size, minimize_ram=minimize_ram)

    def min_bytes(self, ram: int | None) -> int:
        """Return the fewest bytes of the device with which anything fits: something always does, from the disk."""
        sizes = (variant_search.min_bytes(ram) for variant_search in self.variant_searches)
        return min(size for size in sizes if size is not None)

    def tightest_phases(self, size: int, ram: int | None) -> set[str]:
        """Return the phases that need all of `size` bytes in the combinations that just fit them."""
        return {name for variant_search in self.variant_searches for name in variant_search.tightest_phases(size, ram)}

    def min_ram(self, size: int) -> int | None:
        """Return the fewest bytes of host memory with which anything fits `size` device bytes; None if nothing does."""
        sizes = (variant_search.min_ram(size) for variant_search in self.variant_searches)
        return min((ram for ram in sizes if ram is not None), default=None)


def storages_of(footprint: Footprint, allowed: Collection[str]) -> Iterator[Storages]:
    """Yield storages to try in turn: all as loaded; per `allowed` technique, denoisers, encoders, or both narrowed."""
    yield {}
    storages: list[Storage] = ["float8_e4m3fn"] * ("fp8" in allowed) + ["int8"] * ("int8" in allowed)  # type: ignore[assignment]
    roles = {role: [c.name for c in footprint.components if c.role == role] for role in ("denoiser", "encoder")}
    for storage in storages:
        for some in ([roles["denoiser"]], [roles["encoder"]], [*roles.values()]):
            yield {name: storage for names in some for name in names}
