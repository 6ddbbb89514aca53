"""Everything that can be done about one component's weights, with what each would take and how long it would work.

There are finitely many, and which there are does not depend on a budget: so what fits into a smaller budget fits into
a larger one, and more budget is never slower. Of each it is known at once what it takes at the least; what it takes
indeed is worked out only if it may be the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from tightfit.plan.guests import Guests
from tightfit.plan.pace import Pace, Stretch, alone
from tightfit.plan.parts import Part
from tightfit.plan.streaming import ALIGNMENT, BLOCKS_FROM, least_and_most, parcel_sizes, spread_evenly
from tightfit.records import Accelerator, Component, ComponentPlan, Footprint, Pass, Plan, Reason, Storage, Variant
from tightfit.units import format_bytes, format_seconds

__all__ = ["Menu", "Option", "Task", "Where", "variant_of", "why_there"]

Where = Literal["resident", "host", "disk"]  # the home of what comes and goes
Runs = Sequence[tuple[Pass, int]]  # passes of one phase, and how often each is done at a time

FEW = 6  # layers, of which all selections are tried
GIANTS, GIANT = 5, 1.5  # so many layers stay for their size, if each is so many times as large as the next, …
SHARES = 4  # … and of the rest none to three fourths
ENOUGH = 0.9  # of what is left: who takes less would gain nothing by more
SIZES = 24  # between the least that a component streams with and all of it, each larger by the same factor, …
FEWER = 12  # … and so many where denoisers work otherwise than usual
ROUNDING = 1e-11  # by which sums of the same seconds may differ, of themselves


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


class Offer:
    """An option that is worked out when it is asked for; before, what it takes at the least."""

    def __init__(self, seconds: float, comes: int, settle: Callable[[], Part], time: Callable[[Part], float]) -> None:
        """`settle` decides what the plan leaves open, and `time` plays it, which is long."""
        self.seconds = seconds * (1 - ROUNDING)
        self.comes = comes
        self._settle, self._time = settle, time

    @cached_property
    def part(self) -> Part:
        return self._settle()

    @cached_property
    def option(self) -> Option:
        part = self.part
        ram = part.component.bytes if part.plan.home == "host" and not part.remains else 0
        return Option(part.comes, self._time(part), ram, part.always, part.plan)

    def may_beat(self, other: Option) -> bool:
        """Whether it may be faster than `other`, or as fast and take less."""
        return self.seconds < other.seconds * (1 - 2 * ROUNDING) or self.comes < other.comes


class Menu:
    """Options by size: which is the fastest within some bytes. By any of them, `always` are there all along."""

    def __init__(self, offers: Iterable[Offer], always: int) -> None:
        self.offers = sorted(offers, key=lambda offer: (offer.seconds, offer.comes))
        self.always = always

    def within(self, size: int) -> Option | None:
        """The fastest, and of those the least, for which at most `size` bytes come; None if there is none."""
        best: Option | None = None
        for offer in self.offers:
            if best is not None and offer.seconds > best.seconds:
                break
            hopeful = offer.comes <= size and (best is None or offer.may_beat(best))
            if hopeful and offer.part.comes <= size and (best is None or _rank(offer.option) < _rank(best)):
                best = offer.option
        return best

    @cached_property
    def least(self) -> int | None:
        """The fewest bytes that come for any of them; None if there is none."""
        least: int | None = None
        for offer in sorted(self.offers, key=lambda offer: offer.comes):
            if least is not None and offer.comes >= least:
                break
            least = offer.part.comes if least is None else min(least, offer.part.comes)
        return least

    def soonest(self, size: int) -> float | None:
        """Seconds at the least of whatever at most `size` bytes come for; None if there is nothing."""
        return next((offer.seconds for offer in self.offers if offer.comes <= size), None)

    def __iter__(self) -> Iterator[Option]:
        """Each takes more than the one before, and is faster."""
        fastest = float("inf")
        for option in sorted((offer.option for offer in self.offers), key=lambda option: option[:3]):
            if option.seconds < fastest:
                fastest = option.seconds
                yield option


def _rank(option: Option) -> tuple[float, int, int]:
    return option.seconds, option.comes, option.ram


class Task:
    """What `component` does on `device` in the call that `footprint` tells of."""

    def __init__(self, component: Component, footprint: Footprint, device: Accelerator) -> None:
        self.component, self.device = component, device
        self._work, self._pace = _work_of(component, footprint), Pace(component, device)
        self._by_leaf = self._pace.leaf_seconds(footprint, component)

    @cached_property
    def seconds(self) -> float:
        """How long it works where all weights are there."""
        return sum(count * alone(self._pace.stretches(done)) for runs in self._work for done, count in runs)

    def menu(
        self,
        where: Where,
        disk_rate: float | None = None,
        storage: Storage = "as-loaded",
        variant: Variant | None = None,
    ) -> Menu:
        """What can be done with its weights being `where`, if it works as usual, or as `variant` says."""
        plans = _plans(self.component, where, storage, self._by_leaf, SIZES if variant is None else FEWER)
        if variant is not None:
            changed = (plan.model_copy(update=variant.fields) for plan in plans)
            asked = [plan for plan in changed if _suits(variant, plan)]
        else:
            asked = plans
        part = Part(self.component, plans[0], self.device, self._pace, disk_rate)
        least = _Least(part, self._work, self._pace)

        def offer(plan: ComponentPlan) -> Offer:
            seconds, comes = (self.seconds, 0) if part.remains else least.of(plan)

            def settle() -> Part:
                return Part(self.component, plan, self.device, self._pace, disk_rate, self._by_leaf)

            return Offer(seconds, comes, settle, self._time)

        return Menu(map(offer, asked), part.always)

    def _time(self, part: Part) -> float:
        """Seconds of its work as `part` does it."""
        spent = 0.0
        for runs in self._work:
            spent = spent if part.remains else part.come(spent)
            for done, count in runs:
                spent = part.work(done, count, spent)
        return spent


class _Least:
    """What all plans have in common for weights at one home, and what each takes at the least."""

    def __init__(self, part: Part, work: Sequence[Runs], pace: Pace) -> None:
        """`part` is there by phases, or resident."""
        component, self._rate, self._launch = part.component, part.rate, part.launch
        sizes = parcel_sizes(component, "leaf", part.plan)
        self._leaf = max(sizes.values(), default=0)
        self._block = max(parcel_sizes(component, "block", part.plan).values(), default=0)
        blocks = component.compiled or sum(sizes.values()) >= BLOCKS_FROM * self._block
        less = ALIGNMENT if blocks else 0  # by which some plan may round them otherwise, together
        self._sizes = {leaf: size - less for leaf, size in sizes.items()}
        self._small = component.bytes - sum(leaf.bytes for leaf in component.leaves)
        self._loose = 0 if part.on_cpu else self._small  # of what comes
        self._first = 0.0  # seconds until all that phases need has come once
        self._again: list[tuple[int, float, int]] = []  # later passes: how many, their seconds, what they need
        for (first, count), *later in work:
            self._first += part.come(0.0) + self._coming(pace.stretches(first))
            self._again += [self._pass(pace, done, runs) for done, runs in ((first, count - 1), *later)]

    def of(self, plan: ComponentPlan) -> tuple[float, int]:
        """Seconds, and bytes that come."""
        if plan.placement == "per-phase":
            room = least = sum(self._sizes.values())
        elif plan.stays is None:
            room = least = max((plan.weights or 0) - self._small, 0)
            least -= self._leaf if room < BLOCKS_FROM * self._block else self._block  # that may be left over
        else:
            room = least = sum(self._sizes[name] for name in plan.stays) + (plan.ring or 0)
        again = sum(runs * max(seconds, (needed - room) / self._rate) for runs, seconds, needed in self._again)
        return self._first + again, max(least, 0) + self._loose

    def _coming(self, stretches: Sequence[Stretch]) -> float:
        """Seconds of a first pass: by the time something begins, all that was needed until then has come."""
        came, now, there = self._launch * self._rate, 0.0, set[str]()
        for stretch in stretches:
            if stretch.parcel not in there:
                there.add(stretch.parcel)
                came += self._sizes.get(stretch.parcel, 0)
            now = max(now, came / self._rate) + stretch.seconds
        return now

    def _pass(self, pace: Pace, done: Pass, runs: int) -> tuple[int, float, int]:
        """What a later pass takes of the device: its host may have launched while weights of the first were awaited."""
        stretches = pace.stretches(done)
        needed = sum(self._sizes.get(leaf, 0) for leaf in {stretch.parcel for stretch in stretches})
        return runs, sum(stretch.seconds for stretch in stretches), needed


def variant_of(footprint: Footprint, plan: Plan) -> Variant | None:
    """How denoisers work by `plan`, of what `footprint` tells of; None: as usual."""
    parts = [plan.components[name] for name in footprint.denoisers if name in plan.components]
    return next((variant for variant in footprint.variants if all(_suits(variant, part) for part in parts)), None)


def _suits(variant: Variant, part: ComponentPlan) -> bool:
    """Whether a denoiser under `part` of a plan works as `variant` says.

    What streams works on parts block by block, and what does not as a whole.
    """
    if variant.in_parts and variant.by_blocks != (part.placement == "per-unit"):
        return False
    return all(getattr(part, name) == value for name, value in variant.fields.items())


def why_there(task: Task, option: Option, left: int, phase: str) -> Reason:
    """Why `option` of a task's component was taken: in `phase` there were `left` bytes for what comes and goes."""
    name, plan, whole = task.component.name, option.plan, format_bytes(task.component.bytes)
    if plan.placement == "resident":
        return Reason(decision=f"{name} stays", because=f"there is room for its {whole} in every phase")
    there = f"{format_bytes(max(left, 0))} are left for it in {phase}"
    whence = " from the disk" if plan.home == "disk" else ""
    if plan.placement == "per-phase":
        return Reason(
            decision=f"{name} comes{whence} for its phase, and goes", because=f"{there}: all of its {whole} fit"
        )
    late = option.seconds - task.seconds
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
    component: Component, where: Where, storage: Storage, seconds: Mapping[str, float] | None, count: int
) -> list[ComponentPlan]:
    if where == "resident":
        return [ComponentPlan(placement="resident", storage=storage)]
    plans = [ComponentPlan(placement="per-phase", home=where, storage=storage)]
    if component.leaves:
        streams = ComponentPlan(placement="per-unit", home=where, storage=storage)
        least, most = least_and_most(component, streams)
        sizes = {int(least * (most / least) ** (step / count)) for step in range(count)} if least < most else set()
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


def _work_of(component: Component, footprint: Footprint) -> list[Runs]:
    """Its passes, and how often each is done at a time, by the times that it comes, if it does not stay."""
    guests, work = Guests(), list[list[Pass]]()
    for done in (phase.passes[index] for phase in footprint.phases for index in phase.order):
        came = guests.works(done.component)
        if done.component == component.name:
            work += [[]] if came else []
            work[-1].append(done)
    return [[(group[0], len(group)) for group in _alike(passes)] for passes in work]


def _alike(passes: Sequence[Pass]) -> Iterator[list[Pass]]:
    """The same ones next to each other."""
    return (list(group) for _, group in itertools.groupby(passes, key=id))
