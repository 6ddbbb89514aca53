"""Search over several devices, each with its own budget: where each component computes, and where its weights are.

Each component computes on one device. What a device does for its components is independent of the other devices, so
the best joint solution consists of each device's best; only RAM is shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.device_maps import fixed_locations
from tightfit.plan.device_search import DeviceSearch, ParetoFront, Storages
from tightfit.plan.forecast import share_of
from tightfit.plan.options import SearchCache
from tightfit.plan.placement_search import Solution
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.stores import StoreRates

__all__ = ["Assignment", "DeviceBudget", "JointSolution", "MultiDeviceSearch"]

_GUESS = 0.02  # first guess of how much the best exceeds the lower bound, as a fraction of it …
_SHORTEST = 1e-6  # … but at least this many seconds
_BALANCING = 0.02  # fraction of its time by which a balanced solution may exceed the fastest
_ROUNDING = 1e-9  # relative difference up to which times are equal
_OWN = {"name", "bytes", "free", "allocated", "product_name"}  # fields of an accelerator that do not affect its speed


class DeviceBudget(NamedTuple):
    """A device, and how many of its bytes may be used."""

    device: Accelerator
    size: int


class Assignment(NamedTuple):
    """Components that compute on one member, given by its index; it `hosts` the pipeline if denoisers are there."""

    member: int
    names: frozenset[str]
    hosts: bool


class JointSolution(NamedTuple):
    """Solution over all devices."""

    seconds: float
    peaks: int  # sum of the devices' peaks in bytes
    ram: int  # bytes of host memory
    shares: tuple[tuple[Assignment, Solution], ...]  # the host's first

    def is_better_than(self, other: JointSolution) -> bool:
        """Return whether it takes less time or, where times are equal up to rounding, has fewer devices or less memory.

        A sum of times in another order differs in its last digits. (Rounded times would not do: two that differ by so
        little can be on both sides of where rounding goes up.)
        """
        if not math.isclose(self.seconds, other.seconds, rel_tol=_ROUNDING):
            return self.seconds < other.seconds
        return (len(self.shares), self.peaks, self.ram) < (len(other.shares), other.peaks, other.ram)


class MultiDeviceSearch:
    """Joint options of `members` for the call that `footprint` describes, with components stored as `storages` says.

    `host` is the index of the member on which denoisers compute, if that is fixed; `device_map` fixes more.
    `store_rates`: see `StoreRates`.
    """

    def __init__(
        self,
        footprint: Footprint,
        members: Sequence[DeviceBudget],
        store_rates: StoreRates,
        storages: Storages,
        host: int | None = None,
        device_map: DeviceMap | None = None,
    ) -> None:
        self.device_map = device_map or DeviceMap()
        numbers = {member.device.name: number for number, member in enumerate(members)}
        self._fixed = {name: numbers[card] for name, card in self.device_map.cards.items()}
        self.footprint, self.members = footprint, members
        self.store_rates, self._storages, self._host = store_rates, storages, host
        self._kinds = [member.device.model_dump_json(exclude=_OWN) for member in members]
        self._caches: dict[str, dict[int, SearchCache]] = {}
        self._searches: dict[tuple[str, frozenset[str], bool], DeviceSearch] = {}
        self._known_min_bytes: dict[tuple[int, int | None], int] = {}
        self._fronts: dict[tuple[int, int, int | None], ParetoFront] = {}

    def search(self, assignment: Assignment) -> DeviceSearch:
        """Return the search over the options of `assignment`; devices of equal speed share it."""
        kind = self._kinds[assignment.member]
        key = kind, assignment.names, assignment.hosts
        if key not in self._searches:
            share = share_of(self.footprint, assignment.names, hosts=assignment.hosts)
            device = self.members[assignment.member].device
            caches = self._caches.setdefault(kind, {})
            fixed = fixed_locations(self.device_map, share, device)
            self._searches[key] = DeviceSearch(share, device, self.store_rates, self._storages, caches, fixed)
        return self._searches[key]

    def best(
        self, ram: int | None, alone: int | None = None, than: JointSolution | None = None
    ) -> JointSolution | None:
        """Return the best solution within the members' bytes and `ram` bytes of host memory (None: unlimited), if any.

        With `alone`, all components compute on the member of this index. With `than`, return that if none is better.
        """
        choices = (
            self.assignments() if alone is None else [(Assignment(alone, frozenset().union(*self._groups), True),)]
        )
        fronts = [
            (assignments, [self._front(assignment, ram) for assignment in assignments]) for assignments in choices
        ]
        best = than
        for assignments, each in sorted(fronts, key=lambda chosen: _lower_bound(chosen[1])):
            if _lower_bound(each) < math.inf and (best is None or _lower_bound(each) <= best.seconds * (1 + _ROUNDING)):
                best = _best(assignments, each, ram, best)
        return best

    def balanced(self, ram: int | None, fastest: JointSolution) -> JointSolution:
        """Return the solution whose fullest member is least full, of those hardly slower than `fastest`.

        Of those that are equally full, to a percent, it is the fastest. Of each assignment only the fastest solution is
        compared; `ram`: as for `best`.
        """
        most, found = fastest.seconds * (1 + _BALANCING) + _SHORTEST, fastest
        for assignments in self.assignments():
            fronts = [self._front(assignment, ram) for assignment in assignments]
            each = _best(assignments, fronts, ram, None) if _lower_bound(fronts) <= most else None
            if each is not None and each.seconds <= most and self._unevenness(each) < self._unevenness(found):
                found = each
        return found

    def fullness(self, solution: JointSolution) -> list[float]:
        """Return the predicted peak of each member as a share of its bytes."""
        peaks = {assignment.member: found.peak for assignment, found in solution.shares}
        return [peaks.get(number, 0) / max(member.size, 1) for number, member in enumerate(self.members)]

    def _unevenness(self, solution: JointSolution) -> tuple[float, float, list[float]]:
        fullness = sorted(self.fullness(solution), reverse=True)
        return round(fullness[0], 2), round(solution.seconds, 6), fullness

    @property
    def host(self) -> int | None:
        """Index of the member on which denoisers compute, if that is fixed."""
        return self._host

    def kind_of(self, number: int) -> tuple[str, int]:
        """Return what the member of that index is, as far as it matters here: equal members have equal kinds."""
        return self._kinds[number], self.members[number].size

    def with_parts(
        self, footprint: Footprint, owners: Mapping[str, Sequence[str]], cards: Mapping[str, str]
    ) -> MultiDeviceSearch:
        """Return the search for `footprint`, in which components are split into parts that compute on `cards`.

        `owners` has the names of the parts of each component, which are all stored alike.
        """
        storages = {part: s for name, s in self._storages.items() for part in owners.get(name, (name,))}
        device_map = self.device_map.model_copy(update={"components": {**self.device_map.components, **cards}})
        return MultiDeviceSearch(footprint, self.members, self.store_rates, storages, None, device_map)

    def with_footprint(self, footprint: Footprint) -> MultiDeviceSearch:
        """Return the search for another `footprint` of the same call."""
        return MultiDeviceSearch(footprint, self.members, self.store_rates, self._storages, self._host, self.device_map)

    def without_map(self) -> MultiDeviceSearch:
        """Return the search in which nothing is fixed."""
        return MultiDeviceSearch(self.footprint, self.members, self.store_rates, self._storages, self._host)

    def fits(self, ram: int | None) -> bool:
        """Whether anything fits within the members' bytes and `ram` bytes of host memory (None: unlimited)."""
        return any(self._fits(assignments, ram) for assignments in self.assignments())

    def min_bytes(self, member: int, ram: int | None) -> int | None:
        """Return the fewest bytes of `member` with which anything fits, the others unchanged; None if nothing does."""
        sizes = []
        for assignments in self.assignments():
            own = [assignment for assignment in assignments if assignment.member == member]
            if own and self._fits([assignment for assignment in assignments if assignment.member != member], ram):
                sizes.append(self._min_bytes(own[0], ram))
        return min(sizes, default=None)

    def min_ram(self) -> int | None:
        """Return the fewest bytes of host memory with which anything fits the members' bytes; None if nothing does."""
        sums = []
        for assignments in self.assignments():
            sizes = [
                self.search(assignment).min_ram(self.members[assignment.member].size) for assignment in assignments
            ]
            known = [size for size in sizes if size is not None]
            sums += [sum(known)] if len(known) == len(sizes) else []
        return min(sums, default=None)

    def _fits(self, assignments: Sequence[Assignment], ram: int | None) -> bool:
        return all(
            self._min_bytes(assignment, ram) <= self.members[assignment.member].size for assignment in assignments
        )

    def _min_bytes(self, assignment: Assignment, ram: int | None) -> int:
        """Return the fewest bytes of its device. If RAM is limited, it is needed only for feature maps of strips."""
        cuts = any(c.role == "autoencoder" and c.name in assignment.names for c in self.footprint.components)
        search, limit = self.search(assignment), ram if ram is None or cuts else 0
        key = id(search), limit
        if key not in self._known_min_bytes:
            self._known_min_bytes[key] = search.min_bytes(limit)
        return self._known_min_bytes[key]

    @cached_property
    def _fixed_groups(self) -> list[tuple[int | None, frozenset[str]]]:
        """Components that share a device: denoisers and all unused ones; autoencoders; each other one by itself.

        Each with the member on which the device map fixes them (None: any). What is fixed to different devices is
        separate; what is not fixed is with the first that is.
        """
        used = {call.component for phase in self.footprint.phases for call in phase.calls}
        by_role: dict[str, dict[int | None, set[str]]] = {"denoiser": {}}
        for component in sorted(self.footprint.components, key=lambda c: c.name not in self._fixed):
            alone = component.role not in ("denoiser", "autoencoder")
            key = (component.name if alone else component.role) if component.name in used else "denoiser"
            by_device = by_role.setdefault(key, {})
            fixed = self._fixed.get(component.name) if component.name in used else None
            number = fixed if fixed is not None or not by_device else next(iter(by_device))
            by_device.setdefault(number, set()).add(component.name)
        return [(number, frozenset(names)) for by_device in by_role.values() for number, names in by_device.items()]

    @property
    def _groups(self) -> list[frozenset[str]]:
        return [names for _, names in self._fixed_groups]

    def assignments(self) -> Iterator[tuple[Assignment, ...]]:
        """Yield all ways to assign components, the host's first in each; of equal members only one is tried."""
        for places in self._places(()):
            members = dict.fromkeys(places)
            together = {
                m: [group for group, member in zip(self._groups, places, strict=True) if member == m] for m in members
            }
            yield tuple(Assignment(m, frozenset().union(*groups), m == places[0]) for m, groups in together.items())

    def _places(self, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield a member index for each group; the first groups have those in `taken`."""
        if len(taken) == len(self._groups):
            yield taken
            return
        tried, fixed = set(), [member for member, _ in self._fixed_groups]
        for number, member in enumerate(self.members):
            kind = number if number in taken or number in fixed else (self._kinds[number], member.size)
            allowed = fixed[len(taken)] in (None, number) and (taken or self._host in (None, number))
            if kind not in tried and allowed:
                tried.add(kind)
                yield from self._places((*taken, number))

    def _front(self, assignment: Assignment, ram: int | None) -> ParetoFront:
        """Return the Pareto front of an assignment's device, over RAM too if that is limited."""
        search, size = self.search(assignment), self.members[assignment.member].size
        key = id(search), size, ram
        if key not in self._fronts:
            self._fronts[key] = search.front(size, ram, minimize_ram=ram is not None)
        return self._fronts[key]


def _lower_bound(fronts: Sequence[ParetoFront]) -> float:
    """Return the sum of the fronts' lower bounds, in seconds."""
    return sum(front.lower_bound for front in fronts)


def _best(
    assignments: Sequence[Assignment], fronts: Sequence[ParetoFront], ram: int | None, best: JointSolution | None
) -> JointSolution | None:
    """Return the best combination of the fronts' solutions, or the `best` so far if none is better.

    Each front is searched only up to a time that leaves the others their lower bounds. If there is no solution yet to
    set the limit, the limit is guessed and raised until it is reached.
    """
    lower_bound = _lower_bound(fronts)
    limit = best.seconds if best else lower_bound + max(_GUESS * lower_bound, _SHORTEST)
    while True:
        shares = [front.within((limit - lower_bound + front.lower_bound) * (1 + _ROUNDING)) for front in fronts]
        for chosen in itertools.product(*shares):
            found = _joint_solution(assignments, chosen)
            if (ram is None or found.ram <= ram) and (best is None or found.is_better_than(best)):
                best = found
        if all(front.done for front in fronts) or (best is not None and best.seconds <= limit):
            return best
        limit = best.seconds if best else lower_bound + 2 * (limit - lower_bound)


def _joint_solution(assignments: Sequence[Assignment], chosen: Sequence[Solution]) -> JointSolution:
    seconds, peaks = sum(found.seconds for found in chosen), sum(found.peak for found in chosen)
    ram = sum(found.variant_search.ram_of(found) for found in chosen)
    return JointSolution(seconds, peaks, ram, tuple(zip(assignments, chosen, strict=True)))
