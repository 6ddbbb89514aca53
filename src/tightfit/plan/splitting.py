"""Search over where networks are split over devices, beside what `MultiDeviceSearch` finds without that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tightfit.plan.forecast import most_weights
from tightfit.plan.multi_device_search import JointSolution, MultiDeviceSearch
from tightfit.plan.network_parts import order_of, overlaps_parts, part_of
from tightfit.plan.split_footprint import part_names, split_components
from tightfit.schema.footprint import Component, Footprint
from tightfit.schema.network_part import PART_FIELDS
from tightfit.schema.plan import ComponentPlan, NetworkPart, Reason
from tightfit.units import format_seconds

__all__ = [
    "WORTH",
    "SplitSolution",
    "Splits",
    "best_split",
    "can_split",
    "chains",
    "folded",
    "solve",
    "split_reasons",
    "splits_by_memory",
]

WORTH = 0.005  # fraction of the call's time that a split has to gain
_PLACES = 8  # networks are split at multiples of this fraction of their bytes
_TRIED = 3  # ways that are tried to split a network over the same devices, those nearest to their memory's shares
Splits = Mapping[str, ComponentPlan]  # plans that say only where components begin and are split, by name


class SplitSolution(NamedTuple):
    """Solution with some components split as `splits` says, and the search that found it."""

    splits: Splits
    search: MultiDeviceSearch
    found: JointSolution


def best_split(search: MultiDeviceSearch, ram: int | None, fastest: JointSolution | None) -> SplitSolution | None:
    """Return a solution with networks split that is faster than `fastest` of `search`, or fits where that is None.

    Only networks that would not be resident are split: denoisers, together, and then encoders one by one. None: nothing
    is gained, or too little. `ram`: as for `MultiDeviceSearch.best`.
    """
    best: SplitSolution | None = None
    for names in _splittable(search, fastest):
        known = best
        for devices in chains(search, names):
            for splits in splits_by_memory(search, names, devices):
                combined = {**(known.splits if known else {}), **splits}
                usual = best.found if best else fastest
                found = solve(search, combined, ram, usual)
                enough = math.inf if fastest is None else fastest.seconds * (1 - WORTH)
                if found is not None and found.found.seconds < enough:
                    best = found
    return best


def folded(components: Mapping[str, ComponentPlan], splits: Splits) -> dict[str, ComponentPlan]:
    """Return the plans of `components`, among them those of parts, with each part in its component's `split`."""
    plans = dict(components)
    for name, chosen in splits.items():
        later = {}
        for own, (device, part) in zip(part_names(name, chosen)[1:], chosen.split.items(), strict=True):
            plan = plans.pop(own)
            later[device] = part.model_copy(update={field: getattr(plan, field) for field in PART_FIELDS})
        chunks = {"cfg": chosen.cfg, "max_batch": chosen.max_batch}
        plans[name] = plans[name].model_copy(update={"split": later, **chunks})
    return plans


def split_reasons(solution: SplitSolution, usual: float) -> Iterator[Reason]:
    """Yield why networks are split, where the call takes `usual` seconds otherwise (infinity: it does not fit)."""
    together = any(map(overlaps_parts, solution.splits.values()))
    for name, chosen in solution.splits.items():
        because = "no device has the memory for it otherwise"
        if usual < math.inf:
            saved = format_seconds(usual - solution.found.seconds)
            because = f"on one device, where it is not resident, it would make the call {saved} longer"
            if together:
                because = f"the call is then {saved} shorter"
            if overlaps_parts(chosen):
                because = f"the parts then work at the same time, which makes the call {saved} shorter"
        where = [f"blocks from {part.first} on compute on {device}" for device, part in chosen.split.items()]
        some = f"{chosen.max_batch} items" if chosen.max_batch else "half of a batch"
        how = f", with {some} at a time" if chosen.splits_batch else ""
        how = ", with the two calls of a step as one, in halves" if chosen.cfg == "batched" else how
        yield Reason(decision=f"{name} is split{how}: {', '.join(where)}", because=because)


def _splittable(search: MultiDeviceSearch, fastest: JointSolution | None) -> Iterator[list[str]]:
    """Yield the names of components that are split alike, if they have blocks and would not be resident."""
    shares = fastest.shares if fastest else ()
    options = {name: option.plan for _, share in shares for name, option in share.options}
    able = [
        component for component in search.footprint.components
        if component.role in ("denoiser", "encoder") and can_split(search, component)
        and (not options or options.get(component.name, ComponentPlan()).placement != "resident")
    ]  # fmt: skip
    denoisers = [component.name for component in able if component.role == "denoiser"]
    if denoisers:
        yield denoisers
    for component in able:
        if component.role == "encoder":
            yield [component.name]


def can_split(search: MultiDeviceSearch, component: Component) -> bool:
    """Whether `component` runs, has several blocks, and its device is not fixed."""
    fixed = component.compiled or component.name in search.device_map.components
    return not fixed and len(order_of(component)) > 1 and _called(search.footprint, component)


def _called(footprint: Footprint, component: Component) -> bool:
    """Whether the call runs `component`, without a backward pass."""
    calls = [call for phase in footprint.phases for call in phase.calls if call.component == component.name]
    return bool(calls) and all(call.backward_from is None for call in calls)


def chains(search: MultiDeviceSearch, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the members on which the parts may be, in order: all pairs, and all members; equal ones count once."""
    numbers, tried = range(len(search.members)), set()
    hosts = any(name in search.footprint.denoisers for name in names)
    for count in sorted({2, len(search.members)} - {1}):
        for chain in itertools.permutations(numbers, count):
            kinds = tuple(search.kind_of(number) for number in chain)
            if kinds not in tried and (not hosts or search.host in (None, chain[0])):
                tried.add(kinds)
                yield chain


def splits_by_memory(search: MultiDeviceSearch, names: Sequence[str], devices: Sequence[int]) -> Iterator[Splits]:
    """Yield splits of `names` over `devices`, those nearest to the bytes that each device has for weights."""
    components = [component for component in search.footprint.components if component.name in names]
    rooms = [[_room(search, number, component) for number in devices] for component in components]
    whole = sum(map(sum, rooms))
    shares = [sum(sum(room[:count]) for room in rooms) / whole for count in range(1, len(devices))]
    first, *later = [search.members[number].device.name for number in devices]

    def distance(places: tuple[int, ...]) -> float:
        return sum(abs(place / _PLACES - share) for place, share in zip(places, shares, strict=False))

    tried: list[Splits] = []
    for places in sorted(itertools.combinations(range(1, _PLACES), len(devices) - 1), key=distance)[:_TRIED]:
        splits = {}
        for component in components:
            blocks = [_block_at(component, place / _PLACES) for place in places]
            if len(set(blocks)) == len(blocks):
                parts = {device: NetworkPart(first=block) for device, block in zip(later, blocks, strict=True)}
                splits[component.name] = ComponentPlan(device=first, split=parts)
        if len(splits) == len(components) and splits not in tried:
            tried.append(splits)
            yield splits


def _room(search: MultiDeviceSearch, number: int, component: Component) -> int:
    """Return the bytes of a member for the weights of `component`, in the tightest phase in which it runs."""
    member = search.members[number]
    phases = [
        phase.allocator_bytes
        for phase in search.footprint.phases
        if any(call.component == component.name for call in phase.calls)
    ]
    return max(most_weights(member.size, max(phases), member.device), 1)


def _block_at(component: Component, share: float) -> str:
    """Return the block before which is about that share of the bytes of `component`; never its first."""
    _, *blocks = order_of(component)
    before = [part_of(component, ComponentPlan(split={"": NetworkPart(first=block)}), 0).bytes for block in blocks]
    return min(zip(before, blocks, strict=True), key=lambda each: abs(each[0] - share * component.bytes))[1]


def solve(
    search: MultiDeviceSearch, splits: Splits, ram: int | None, usual: JointSolution | None
) -> SplitSolution | None:
    """Return the best with `splits`, if it is better than `usual`."""
    cards = {
        own: device
        for name, chosen in splits.items()
        for own, device in zip(part_names(name, chosen), chosen.parts(chosen.device or ""), strict=True)
    }
    owners = {name: part_names(name, chosen) for name, chosen in splits.items()}
    parts = search.with_parts(split_components(search.footprint, splits), owners, cards)
    found = parts.best(ram, than=usual)
    return None if found is None or found is usual else SplitSolution(splits, parts, found)
