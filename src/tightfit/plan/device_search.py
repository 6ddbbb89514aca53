"""Search over all options of one device: each variant of the denoisers, with all combinations of everything else.

Which options there are does not depend on a budget. So a larger budget is never slower, and what fits a smaller one
fits a larger one too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from tightfit.plan.options import SearchCache
from tightfit.plan.placement_search import SearchNode, Solution, VariantSearch
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Storage
from tightfit.schema.stores import StoreRates

__all__ = ["DeviceSearch", "ParetoFront", "Stored", "storages_of"]

Stored = Mapping[str, Storage]


class ParetoFront:
    """Fastest solutions for every amount of host memory up to a limit, searched most promising first."""

    def __init__(self, nodes: Iterable[SearchNode], size: int, *, sparing: bool) -> None:
        """Solutions fit `size` bytes of the device; if not `sparing`, only the fastest is kept, whatever its RAM."""
        self._chances: list[tuple[float, int, SearchNode]] = []
        self._size, self._sparing = size, sparing
        self._best: list[Solution] = []
        for number, chance in enumerate(nodes):
            self._push(number, chance)

    @property
    def soonest(self) -> float:
        """Lower bound of all solutions in seconds, as far as known; infinite if nothing fits."""
        left = self._chances[0][0] if self._chances else math.inf
        return min([left, *(found.seconds for found in self._best)])

    @property
    def done(self) -> bool:
        """Whether all nodes have been searched."""
        return not self._chances

    def within(self, seconds: float) -> list[Solution]:
        """Return all solutions of at most `seconds`, and some slower ones: each slower than the last, with less RAM."""
        while self._chances and self._chances[0][0] <= seconds:
            _, number, chance = heapq.heappop(self._chances)
            if any(self._beats(found, chance) for found in self._best):
                continue
            if chance.undecided is None:
                found = chance.branch.find(chance, self._size)
                self._best = self._best if found is None else self._leaner([*self._best, found])
            else:
                chance.undecided.go_on()
                self._push(number, chance)
        return self._best

    def _push(self, number: int, chance: SearchNode) -> None:
        """Add a node if anything fits; of equally promising ones, that of the lowest number is searched first."""
        if chance.lower_bound < math.inf:
            heapq.heappush(self._chances, (chance.lower_bound, number, chance))

    def _leaner(self, every: Iterable[Solution]) -> list[Solution]:
        """Return the solutions that no other one matches in both time and RAM; if not sparing, the fastest."""
        kept: list[Solution] = []
        for found in sorted(every, key=lambda found: (found.seconds, found.peak, found.branch.ram_of(found))):
            if not kept or (self._sparing and found.branch.ram_of(found) < kept[-1].branch.ram_of(kept[-1])):
                kept.append(found)
        return kept

    def _beats(self, found: Solution, chance: SearchNode) -> bool:
        if self._sparing:
            return found.seconds <= chance.lower_bound and found.branch.ram_of(found) <= chance.ram
        return found.seconds < chance.lower_bound


class DeviceSearch:
    """Options of `device` for the call that `footprint` describes, with components stored as `storages` says."""

    def __init__(
        self,
        footprint: Footprint,
        device: Accelerator,
        store_rates: StoreRates,
        storages: Stored,
        known: dict[int, SearchCache] | None = None,
    ) -> None:
        """`known` has earlier results for the same call on devices of equal speed, by variant number (0: usual)."""
        self.footprint, self.device, self.store_rates = footprint, device, store_rates
        self._storages, self._known = storages, {} if known is None else known

    @cached_property
    def branches(self) -> list[VariantSearch]:
        """The search for the usual variant, and one for each other variant."""
        about = self.device, self.store_rates, self._storages
        known = [self._known.setdefault(number, SearchCache()) for number in range(len(self.footprint.variants) + 1)]
        usual = VariantSearch(self.footprint, *about, known=known[0])
        others = zip(self.footprint.variants, known[1:], strict=True)
        return [
            usual,
            *(
                VariantSearch(self.footprint.with_variant(other), *about, other, usual, known=menus)
                for other, menus in others
            ),
        ]

    def best(self, size: int, ram: int | None) -> Solution | None:
        """Return the best within `size` bytes of the device and `ram` of host memory (None: unlimited), if any."""
        return next(iter(self.front(size, ram, sparing=False).within(math.inf)), None)

    def front(self, size: int, ram: int | None, *, sparing: bool) -> ParetoFront:
        """Return the Pareto front within `size` device and `ram` host bytes (None: unlimited); by RAM if `sparing`."""
        nodes = (chance for branch in self.branches for chance in branch.nodes(size, ram))
        return ParetoFront(nodes, size, sparing=sparing)

    def least(self, ram: int | None) -> int:
        """Return the fewest bytes of the device with which anything fits: something always does, from the disk."""
        leasts = (branch.least(ram) for branch in self.branches)
        return min(least for least in leasts if least is not None)

    def tightest(self, size: int, ram: int | None) -> set[str]:
        """Return the phases that need all of `size` bytes in the combinations that just fit them."""
        return {name for branch in self.branches for name in branch.tightest(size, ram)}

    def least_ram(self, size: int) -> int | None:
        """Return the fewest bytes of host memory with which anything fits `size` device bytes; None if nothing does."""
        leasts = (branch.least_ram(size) for branch in self.branches)
        return min((least for least in leasts if least is not None), default=None)


def storages_of(footprint: Footprint, allowed: Collection[str]) -> Iterator[Stored]:
    """Yield storages to try in turn: all as loaded; per `allowed` technique, denoisers, encoders, or both narrowed."""
    yield {}
    storages: list[Storage] = ["float8_e4m3fn"] * ("fp8" in allowed) + ["int8"] * ("int8" in allowed)  # type: ignore[assignment]
    roles = {role: [c.name for c in footprint.components if c.role == role] for role in ("denoiser", "encoder")}
    for storage in storages:
        for some in ([roles["denoiser"]], [roles["encoder"]], [*roles.values()]):
            yield {name: storage for names in some for name in names}
