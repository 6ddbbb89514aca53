"""Several devices, each with its own budget: who computes where, and what is done about weights there.

Each component computes on one of them. What a device does for its components depends on no other device, so the best
of all is made of each one's best; only RAM is everybody's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from tightfit.plan.device_search import DeviceSearch, ParetoFront, Stored
from tightfit.plan.forecast import share_of
from tightfit.plan.placement_search import Solution
from tightfit.plan.search_cache import SearchCache
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator

__all__ = ["Assignment", "DeviceBudget", "JointSolution", "MultiDeviceSearch"]

_GUESS = 0.02  # of the soonest, how much longer it takes
_SHORTEST = 1e-6  # seconds
_ROUNDING = 1e-9
_OWN = {"name", "bytes", "free", "allocated", "product_name"}  # of an accelerator: what says nothing of how fast it is


class DeviceBudget(NamedTuple):
    """A device, and how many of its bytes may be used."""

    device: Accelerator
    size: int


class Assignment(NamedTuple):
    """Components that compute on one member, by its number; it `hosts` the pipeline where denoisers are."""

    member: int
    names: frozenset[str]
    hosts: bool


class JointSolution(NamedTuple):
    """What all do, the better the less."""

    seconds: float
    peaks: int  # bytes of all devices
    ram: int
    shares: tuple[tuple[Assignment, Solution], ...]  # the host's first


class MultiDeviceSearch:
    """What `members` could do together in the call that `footprint` tells of, with components stored in one way.

    `host` is the number of the member on which denoisers compute, if that is settled.
    """

    def __init__(
        self,
        footprint: Footprint,
        members: Sequence[DeviceBudget],
        disk_rate: float | None,
        storages: Stored,
        host: int | None = None,
    ) -> None:
        self.footprint, self.members = footprint, members
        self._disk_rate, self._storages, self._host = disk_rate, storages, host
        self._kinds = [member.device.model_dump_json(exclude=_OWN) for member in members]
        self._known: dict[str, dict[int, SearchCache]] = {}
        self._searches: dict[tuple[str, frozenset[str], bool], DeviceSearch] = {}
        self._leasts: dict[tuple[int, int | None], int] = {}
        self._fronts: dict[tuple[int, int, int | None], ParetoFront] = {}

    def search(self, post: Assignment) -> DeviceSearch:
        """What the device of a post could do for its components; devices as fast share it."""
        kind = self._kinds[post.member]
        key = kind, post.names, post.hosts
        if key not in self._searches:
            share, device = share_of(self.footprint, post.names, hosts=post.hosts), self.members[post.member].device
            known = self._known.setdefault(kind, {})
            self._searches[key] = DeviceSearch(share, device, self._disk_rate, self._storages, known)
        return self._searches[key]

    def best(self, ram: int | None, alone: int | None = None) -> JointSolution | None:
        """The best within the members' bytes and `ram` of host memory (None: as many as wanted), if any.

        With `alone`, the member of this number does all of it.
        """
        postings = self.postings() if alone is None else [(Assignment(alone, frozenset().union(*self._groups), True),)]
        fronts = [(posts, [self._front(post, ram) for post in posts]) for posts in postings]
        best: JointSolution | None = None
        for posts, each in sorted(fronts, key=lambda chosen: _soonest(chosen[1])):
            if _soonest(each) < math.inf and (best is None or _soonest(each) <= best.seconds):
                best = _best(posts, each, ram, best)
        return best

    def fits(self, ram: int | None) -> bool:
        """Whether anything does."""
        return any(self._fit(posts, ram) for posts in self.postings())

    def least(self, member: int, ram: int | None) -> int | None:
        """The fewest bytes of one member with which anything fits, the others as they are; None if nothing does."""
        leasts = []
        for posts in self.postings():
            own = [post for post in posts if post.member == member]
            if own and self._fit([post for post in posts if post.member != member], ram):
                leasts.append(self._least(own[0], ram))
        return min(leasts, default=None)

    def least_ram(self) -> int | None:
        """The fewest bytes of host memory with which anything fits, the members as they are; None if nothing does."""
        leasts = []
        for posts in self.postings():
            each = [self.search(post).least_ram(self.members[post.member].size) for post in posts]
            known = [least for least in each if least is not None]
            leasts += [sum(known)] if len(known) == len(each) else []
        return min(leasts, default=None)

    def _fit(self, posts: Sequence[Assignment], ram: int | None) -> bool:
        return all(self._least(post, ram) <= self.members[post.member].size for post in posts)

    def _least(self, post: Assignment, ram: int | None) -> int:
        """The fewest bytes of its device. Where RAM is limited, nobody needs any but for maps between strips."""
        cuts = any(c.role == "autoencoder" and c.name in post.names for c in self.footprint.components)
        search, limit = self.search(post), ram if ram is None or cuts else 0
        key = id(search), limit
        if key not in self._leasts:
            self._leasts[key] = search.least(limit)
        return self._leasts[key]

    @cached_property
    def _groups(self) -> list[frozenset[str]]:
        """Who computes on the same device: denoisers, with those that never work; autoencoders; all others alone."""
        used = {done.component for phase in self.footprint.phases for done in phase.calls}
        by_role: dict[str, set[str]] = {"denoiser": set()}
        for component in self.footprint.components:
            alone = component.role not in ("denoiser", "autoencoder")
            place = component.name if alone else component.role
            by_role.setdefault(place if component.name in used else "denoiser", set()).add(component.name)
        return [frozenset(names) for names in by_role.values() if names]

    def postings(self) -> Iterator[tuple[Assignment, ...]]:
        """Who could compute where, the host's first; of members that are as good as each other, one is as good."""
        for places in self._places(()):
            members = dict.fromkeys(places)
            together = {
                m: [group for group, place in zip(self._groups, places, strict=True) if place == m] for m in members
            }
            yield tuple(Assignment(m, frozenset().union(*groups), m == places[0]) for m, groups in together.items())

    def _places(self, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """A member for each group; those of the first groups are `taken`."""
        if len(taken) == len(self._groups):
            yield taken
            return
        tried = set()
        for number, member in enumerate(self.members):
            kind = number if number in taken else (self._kinds[number], member.size)
            if kind not in tried and (taken or self._host in (None, number)):
                tried.add(kind)
                yield from self._places((*taken, number))

    def _front(self, post: Assignment, ram: int | None) -> ParetoFront:
        """What a device can do, with less and less RAM where that is limited."""
        search, size = self.search(post), self.members[post.member].size
        key = id(search), size, ram
        if key not in self._fronts:
            self._fronts[key] = search.front(size, ram, sparing=ram is not None)
        return self._fronts[key]


def _soonest(fronts: Sequence[ParetoFront]) -> float:
    """Seconds that all of them take at the least."""
    return sum(front.soonest for front in fronts)


def _best(
    posts: Sequence[Assignment], fronts: Sequence[ParetoFront], ram: int | None, best: JointSolution | None
) -> JointSolution | None:
    """What all could do together, if it is better than the `best` so far.

    Each looks no further than what leaves the others the time that they need. Where nothing is known yet that it must
    be faster than, that is guessed, and guessed again.
    """
    soonest = _soonest(fronts)
    limit = best.seconds if best else soonest + max(_GUESS * soonest, _SHORTEST)
    while True:
        shares = [front.within((limit - soonest + front.soonest) * (1 + _ROUNDING)) for front in fronts]
        for chosen in itertools.product(*shares):
            found = _together(posts, chosen)
            if (ram is None or found.ram <= ram) and (best is None or found[:3] < best[:3]):
                best = found
        if all(front.done for front in fronts) or (best is not None and best.seconds <= limit):
            return best
        limit = best.seconds if best else soonest + 2 * (limit - soonest)


def _together(posts: Sequence[Assignment], chosen: Sequence[Solution]) -> JointSolution:
    seconds, peaks = sum(found.seconds for found in chosen), sum(found.peak for found in chosen)
    ram = sum(found.branch.ram_of(found) for found in chosen)
    return JointSolution(seconds, peaks, ram, tuple(zip(posts, chosen, strict=True)))
