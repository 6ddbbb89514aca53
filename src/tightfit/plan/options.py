"""Everything that can be done about one component's weights, with what each would take and how long it would work.

There are finitely many, and which there are does not depend on a budget: so what fits into a smaller budget fits into
a larger one, and more budget is never slower.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from tightfit.plan.pace import Pace
from tightfit.plan.parts import Part
from tightfit.plan.streaming import least_and_most, parcel_sizes, spread_evenly
from tightfit.records import Accelerator, Component, ComponentPlan, Footprint, Pass, Reason, Storage
from tightfit.units import format_bytes, format_seconds

__all__ = ["Menu", "Option", "Where", "options_of", "why_there"]

Where = Literal["resident", "host", "disk"]  # the home of what comes and goes

FEW = 6  # layers, of which all selections are tried
GIANTS, GIANT = 5, 1.5  # so many layers stay for their size, if each is so many times as large as the next, …
SHARES = 4  # … and of the rest none to three fourths
ENOUGH = 0.9  # of what is left: who takes less would gain nothing by more
SIZES = 24  # between the least that a component streams with and all of it, each larger by the same factor


class Option(NamedTuple):
    """One of them."""

    comes: int  # bytes more on the device while it works
    seconds: float  # of its work in one call
    ram: int  # bytes of host memory for the masters
    always: int  # bytes on the device all along
    plan: ComponentPlan

    @property
    def aboard(self) -> int:
        """Bytes on the device while it works."""
        return self.always + self.comes


class Menu:
    """Options by size: which is the fastest within some bytes."""

    def __init__(self, options: Iterable[Option]) -> None:
        self._best: list[Option] = []  # each takes more than the one before, and is faster
        for option in sorted(options, key=lambda option: option[:3]):
            if not self._best or option.seconds < self._best[-1].seconds:
                self._best.append(option)
        self._sizes = [option.comes for option in self._best]

    def within(self, size: int) -> Option | None:
        """The fastest, and of those the least, for which at most `size` bytes come; None if there is none."""
        index = bisect.bisect_right(self._sizes, size)
        return self._best[index - 1] if index else None

    @property
    def always(self) -> int:
        """Bytes that are there all along, by any of them."""
        return self._best[0].always

    def __iter__(self) -> Iterator[Option]:
        return iter(self._best)


def options_of(
    component: Component,
    footprint: Footprint,
    device: Accelerator,
    where: Where,
    disk_rate: float | None = None,
    storage: Storage = "as-loaded",
) -> list[Option]:
    """What `device` could do with `component` in the call that `footprint` tells of, its weights being `where`."""
    work, pace = _work_of(component, footprint), Pace(component, device)
    seconds = pace.leaf_seconds(footprint, component)

    def option(plan: ComponentPlan) -> Option:
        part, spent = Part(component, plan, device, pace, disk_rate, seconds), 0.0
        for runs in work:
            spent = spent if part.remains else part.come(spent)
            for done, count in runs:
                spent = part.work(done, count, spent)
        ram = component.bytes if plan.home == "host" and not part.remains else 0
        return Option(part.comes if work else 0, spent, ram, part.always, part.plan)

    return [option(plan) for plan in _plans(component, where, storage, seconds)]


def why_there(component: Component, option: Option, resident: Menu, left: int, phase: str) -> Reason:
    """Why `option` of `component` was taken: in `phase` there were `left` bytes for what comes and goes."""
    name, plan, whole = component.name, option.plan, format_bytes(component.bytes)
    if plan.placement == "resident":
        return Reason(decision=f"{name} stays", because=f"there is room for its {whole} in every phase")
    there = f"{format_bytes(max(left, 0))} are left for it in {phase}"
    whence = " from the disk" if plan.home == "disk" else ""
    if plan.placement == "per-phase":
        return Reason(
            decision=f"{name} comes{whence} for its phase, and goes", because=f"{there}: all of its {whole} fit"
        )
    late = option.seconds - min(each.seconds for each in resident)
    cost = f"that costs {format_seconds(late)} in all" if late > 0 else "that costs no time"
    stay = len(plan.stays or ())
    kept = f"{stay} of its layers stay{'s' * (stay == 1)} meanwhile, the others" if stay else "its layers"
    kept += f" come one after another while those before them compute, {format_bytes(plan.ring or 0)} ahead"
    enough = "; more memory would not be faster" if option.comes < ENOUGH * left else ""
    return Reason(
        decision=f"{name} streams{whence}, {format_bytes(option.aboard)} of its {whole} there at a time",
        because=f"{there}: {kept}; {cost}{enough}",
    )


def _plans(
    component: Component, where: Where, storage: Storage, seconds: Mapping[str, float] | None
) -> list[ComponentPlan]:
    if where == "resident":
        return [ComponentPlan(placement="resident", storage=storage)]
    plans = [ComponentPlan(placement="per-phase", home=where, storage=storage)]
    if component.leaves:
        streams = ComponentPlan(placement="per-unit", home=where, storage=storage)
        least, most = least_and_most(component, streams)
        sizes = {int(least * (most / least) ** (step / SIZES)) for step in range(SIZES)} if least < most else set()
        plans += [streams.model_copy(update={"weights": size}) for size in sorted(sizes)]
        plans += _chosen_layers(component, streams, seconds)
    return plans


def _chosen_layers(
    component: Component, streams: ComponentPlan, seconds: Mapping[str, float] | None
) -> Iterator[ComponentPlan]:
    """With few layers, any of them staying; else those that are much larger than all others, and some of the rest."""
    sizes = {} if component.compiled else parcel_sizes(component, "leaf", streams)
    if len(sizes) <= FEW:
        subsets = (itertools.combinations(sizes, count) for count in range(len(sizes)))
        found = [(set(stays), ahead) for some in subsets for stays in some for ahead in (1, 2, 4)]
    else:
        found = list(_with_giants(sizes, seconds))
    for stays, ahead in found:
        passing = sorted((size for name, size in sizes.items() if name not in stays), reverse=True)
        named = tuple(name for name in sizes if name in stays)
        yield streams.model_copy(update={"grain": "leaf", "stays": named, "ring": sum(passing[:ahead])})


def _with_giants(sizes: Mapping[str, int], seconds: Mapping[str, float] | None) -> Iterator[tuple[set[str], int]]:
    """What stays, and how many of the rest the ring holds."""
    order = sorted(sizes, key=lambda name: -sizes[name])
    for count in range(1, GIANTS + 1):
        giants, next_size = set(order[:count]), sizes[order[count]]
        if sizes[order[count - 1]] >= GIANT * next_size:
            rest = {name: size for name, size in sizes.items() if name not in giants}
            for ahead, share in itertools.product((1, 2, 4), range(SHARES)):
                ring = ahead * next_size
                capacity = max(sum(rest.values()) - ring, 0) * share // SHARES
                yield giants | spread_evenly(rest, capacity, ring, seconds), ahead


def _work_of(component: Component, footprint: Footprint) -> list[list[tuple[Pass, int]]]:
    """Its passes, and how often each is done at a time, by phases."""
    work = []
    for phase in footprint.phases:
        own = [index for index in phase.order if phase.passes[index].component == component.name]
        work.append([(phase.passes[index], len(list(group))) for index, group in itertools.groupby(own)])
    return [runs for runs in work if runs]
