"""A footprint whose networks are split over devices: each part is a component of its own, called after the one before.

So all that is planned and predicted of components holds of parts: where weights are, how they are loaded, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tightfit.plan.network_parts import finder_of, overlaps_parts, part_of
from tightfit.schema.footprint import BlockUse, ComponentCall, Footprint, Phase
from tightfit.schema.plan import ComponentPlan, Plan

__all__ = ["part_name", "part_names", "split_components", "with_parts"]


def part_name(name: str, first: str) -> str:
    """Return the name under which a later part of the component `name` is planned."""
    return f"{name} from {first} on"


def part_names(name: str, chosen: ComponentPlan) -> list[str]:
    """Return the names under which the parts of the component `name` are planned."""
    return [name, *(part_name(name, part.first) for part in chosen.split.values())]


def with_parts(footprint: Footprint, plan: Plan) -> tuple[Footprint, Plan]:
    """Return both with the parts of split components as components of their own; unchanged if there are none."""
    split = {name: chosen for name, chosen in plan.components.items() if chosen.split}
    if not split:
        return footprint, plan
    components: dict[str, ComponentPlan] = {}
    for name, chosen in plan.components.items():
        plans = zip(part_names(name, chosen), plan.parts_of(name).values(), strict=True)
        components |= dict(plans) if chosen.split else {name: chosen}
    return split_components(footprint, split), plan.model_copy(update={"components": components})


def split_components(footprint: Footprint, split: Mapping[str, ComponentPlan]) -> Footprint:
    """Return `footprint` with each component in `split` as its parts, by a plan with `split`. Without its variants.

    (Variants of denoisers apply to all parts alike, which are planned for one by one.)
    """
    components = []
    for component in footprint.components:
        chosen = split.get(component.name, ComponentPlan())
        components += [
            part_of(component, chosen, index).model_copy(update={"name": name})
            for index, name in enumerate(part_names(component.name, chosen))
        ]
    finders = {c.name: finder_of(c, split[c.name]) for c in footprint.components if c.name in split}
    phases = tuple(_split_phase(phase, split, finders) for phase in footprint.phases)
    return footprint.model_copy(update={"components": tuple(components), "phases": phases, "variants": ()})


def _split_phase(
    phase: Phase, split: Mapping[str, ComponentPlan], finders: Mapping[str, Callable[[str], int]]
) -> Phase:
    calls: list[ComponentCall] = []
    places: list[range] = []
    for call in phase.calls:
        begin = len(calls)
        name = call.component
        calls += _split_call(call, name, split[name], finders[name]) if name in split else [call]
        places.append(range(begin, len(calls)))
    order = tuple(place for index in phase.call_order for place in places[index])
    return phase.model_copy(update={"calls": tuple(calls), "call_order": order})


def _split_call(
    call: ComponentCall, owner: str, chosen: ComponentPlan, find: Callable[[str], int]
) -> list[ComponentCall]:
    """Return the calls of the parts of `owner`. Their peaks are those of the devices that have only them.

    Where parts overlap, the inputs of a later part may wait on the device before it while other chunks are computed.
    """
    names = part_names(owner, chosen)
    uses: list[list[BlockUse]] = [[] for _ in names]
    begins: list[int | None] = [None for _ in names]
    base, before = (call.block_uses[0].live_bytes_at_start if call.block_uses else 0), 0
    crossing, overlaps, chunks = [0 for _ in names], overlaps_parts(chosen), 1
    for use in call.block_uses:
        index = _part_of_use(use, find, before)
        if index < before and overlaps:  # the next chunk; what was computed stays where it is
            chunks += 1
        elif index != before:  # inputs, and outputs on the way back, cross to where the next block is
            crossing[index or before] += max(use.live_bytes_at_start - base, 0)
        before = index
        uses[index].append(use)
        begins[index] = use.live_bytes_at_start if begins[index] is None else begins[index]
    joined = chosen.cfg == "batched" and overlaps  # two calls are one, of twice as many chunks
    others = 2 * chunks - 1 if joined else chunks - 1
    waiting = [size * others // chunks for size in crossing[1:]] + [0]  # inputs of later parts, of other chunks
    if before:  # the network's output
        crossing[before] += max(call.block_uses[-1].live_bytes_at_start - base, 0)
    parts = []
    for index, name in enumerate(names):
        peak = max((use.peak for use in uses[index]), default=base) - base * (index > 0)
        if not index:  # inputs of later parts are still there while they are copied
            peak = max([peak, *(begin for begin in begins if begin is not None)]) + base * joined
        update = {"component": name, "block_uses": tuple(uses[index]), "peak": max(peak + waiting[index], 0)}
        update |= {"crossing_bytes": crossing[index], "backward_from": None, "is_part": True, "overlaps": overlaps}
        parts.append(call.model_copy(update=update))
    return parts


def _part_of_use(use: BlockUse, find: Callable[[str], int], before: int) -> int:
    if use.block:
        return find(use.block)
    layer = next((work.layer for work in use.layer_work if work.layer), None)
    return before if layer is None else find(layer)
