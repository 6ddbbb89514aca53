"""What moves together, which of it stays, and how large the ring is for the rest.

The order of use is a cycle that is known, so what stays is spread evenly over it: then something small is always on
its way while something else computes, and the ring can be small. (Least recently used is the worst rule for a cycle:
it forgets each layer just before its next use.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from tightfit.errors import PlanError, unknown_name
from tightfit.plan.eight_bits import stored_bytes
from tightfit.schema.footprint import Component
from tightfit.schema.plan import ComponentPlan, Granularity
from tightfit.units import format_bytes

__all__ = [
    "WeightGroupSizes",
    "choose_resident_layers",
    "group_layers",
    "paths_to",
    "resolve_streaming",
    "small_tensor_bytes",
    "weight_group_sizes",
]

ALIGNMENT = 4096  # bytes: sizes in the ring are rounded up to it
PADDING = 1024  # bytes, of four tensors in a flat buffer
SECTORS = 4  # of a disk, that reading a weight and a bias takes beyond the two
AHEAD = 4  # of the largest that pass through, how many the ring holds
CLOSE = 1e-4  # how well the rate of the slowest link is found, of itself
BLOCKS_FROM = 40  # blocks that must fit beside each other before they move as a whole


class MemorySplit(NamedTuple):
    """What some bytes for weights are for."""

    kept: frozenset[str]  # what is so large that it had better stay
    keeping: int  # bytes of it
    ring: int  # bytes
    largest: int  # bytes of the largest of the rest
    spare: int = 0  # bytes for more that stays

    @property
    def least(self) -> int:
        """Of them, as many as are used at the least: what is left over is less than any that passes through."""
        return self.keeping + self.ring + max(self.spare - self.largest, 0)


class WeightGroupSizes:
    """What moves together, in the order of the model, with its bytes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.whole = sizes, sum(sizes.values())
        self.largest = max(sizes.values(), default=0)

    @cached_property
    def order(self) -> list[str]:
        """From the largest to the smallest."""
        return sorted(self.sizes, key=lambda name: -self.sizes[name])

    @property
    def least(self) -> int:
        """The fewest bytes that do."""
        return self._divisions[-1].least

    @property
    def good(self) -> int:
        """The fewest with which the ring is as large as it had better be."""
        return self._divisions[0].least

    def divide(self, room: int) -> MemorySplit:
        """What `room` bytes are for. There are less than none to spare where they are too few."""
        if room >= self.whole:
            return MemorySplit(frozenset(self.sizes), self.whole, 0, 0)
        good, *tighter = self._divisions
        if room >= good.least:
            return good._replace(spare=room - good.least)
        for divided in tighter:  # all for the ring
            if room >= divided.least:
                return divided._replace(ring=room - divided.keeping)
        return good._replace(spare=room - self.least)

    @cached_property
    def _divisions(self) -> list[MemorySplit]:
        """With a ring for AHEAD of the largest that pass through, and for fewer and fewer: in the fewest bytes each."""
        return [self._around(ahead) for ahead in range(AHEAD, 0, -1)]

    def _around(self, ahead: int) -> MemorySplit:
        count, best, keeping, passing = len(self.order), (self.whole, 0, 0), 0, self.whole
        for number, name in enumerate(self.order):
            size = self.sizes[name]
            ring = min(ahead * size, passing)
            if keeping + ring < sum(best[:2]):
                count, best = number, (keeping, ring, size)
            keeping, passing = keeping + size, passing - size
        return MemorySplit(frozenset(self.order[:count]), *best)


def group_layers(component: Component, granularity: Granularity) -> dict[str, list[str]]:
    """The leaves that move together, by the name of what they are part of, in the order of the model."""
    blocks = {block.name for block in component.blocks if block.name} if granularity == "block" else set()
    groups: dict[str, list[str]] = {}
    for layer in component.layers:
        alone = layer.moves_with or layer.name
        groups.setdefault(next((path for path in paths_to(layer.name) if path in blocks), alone), []).append(layer.name)
    return groups


def paths_to(name: str) -> Iterator[str]:
    """Names of all that a part is inside of, the outermost first, and its own."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def resolve_streaming(
    component: Component, chosen: ComponentPlan, seconds: Mapping[str, float] | None = None
) -> ComponentPlan:
    """`chosen` with its granularity, ring buffer and resident layers decided, where it leaves them open.

    `seconds` is how long each of the component's leaves is at work; None: taken to be as their bytes.
    Raises PlanError where `weight_memory` is too little, with what would be enough, and for unknown `resident_layers`.
    """
    granularity = chosen.granularity or _choose_granularity(component, chosen)
    if granularity == "layer" and component.compiled:
        raise PlanError(
            f"{component.name} has compiled blocks, all of whose layers are needed at once: choose granularity=block",
            name=component.name,
        )
    sizes = weight_group_sizes(component, granularity, chosen)
    if chosen.resident_layers is not None:
        return _checked(component, chosen.model_copy(update={"granularity": granularity}), sizes)
    groups, small_bytes = WeightGroupSizes(sizes), small_tensor_bytes(component)
    room = groups.good if chosen.weight_memory is None else chosen.weight_memory - small_bytes
    if room >= groups.whole:
        return chosen.model_copy(update={"granularity": granularity, "resident_layers": tuple(sizes), "ring_buffer": 0})
    divided = groups.divide(room)
    if divided.spare < 0:
        raise _too_little(component, chosen, small_bytes, small_bytes + groups.least)
    left = divided.ring + divided.spare
    ring = divided.ring if chosen.ring_buffer is None else min(chosen.ring_buffer, left)
    passing = {name: size for name, size in sizes.items() if name not in divided.kept}
    resident = choose_resident_layers(passing, left - ring, ring, _by_group(component, granularity, seconds)).union(
        divided.kept
    )
    if (taken := sum(sizes[name] for name in resident) + ring) > room:
        raise PlanError(
            f"{component.name}: a ring of {format_bytes(ring)} cannot take what is larger, and if all that stays, "
            f"its weights take {format_bytes(small_bytes + taken)}, not {format_bytes(small_bytes + room)}: a ring of "
            f"{format_bytes(divided.ring)} would do",
            name=component.name,
            needed_bytes=small_bytes + taken,
        )
    named = tuple(name for name in sizes if name in resident)
    return _checked(
        component,
        chosen.model_copy(update={"granularity": granularity, "ring_buffer": ring, "resident_layers": named}),
        sizes,
    )


def small_tensor_bytes(component: Component) -> int:
    """What is small, and there as long as the component works."""
    return component.bytes - sum(layer.bytes for layer in component.layers)


def _too_little(component: Component, chosen: ComponentPlan, small_bytes: int, least: int) -> PlanError:
    return PlanError(
        f"{component.name}: {format_bytes(chosen.weight_memory or 0)} are too little for its weights: "
        f"{format_bytes(small_bytes)} "
        f"of small ones always stay, and the large ones pass one by one from {least:,} bytes on",
        name=component.name,
        needed_bytes=least,
    )


def _by_group(
    component: Component, granularity: Granularity, seconds: Mapping[str, float] | None
) -> dict[str, float] | None:
    if seconds is None:
        return None
    return {
        name: sum(seconds[layer] for layer in layers) for name, layers in group_layers(component, granularity).items()
    }


def _choose_granularity(component: Component, chosen: ComponentPlan) -> Granularity:
    """Where nobody has tried both: blocks where they are compiled, or there is room for many, else layers.

    The smaller what passes through, the more can stay.
    """
    if chosen.resident_layers:  # by their names
        whole = {block.name for block in component.blocks} - {layer.name for layer in component.layers}
        return "block" if whole.intersection(chosen.resident_layers) else "layer"
    if component.compiled:
        return "block"
    if chosen.weight_memory is None:
        return "layer"
    largest = max(weight_group_sizes(component, "block", chosen).values(), default=0)
    return "block" if chosen.weight_memory - small_tensor_bytes(component) >= BLOCKS_FROM * largest else "layer"


def weight_group_sizes(component: Component, granularity: Granularity, chosen: ComponentPlan) -> dict[str, int]:
    """Bytes in the ring of all that moves together; from disks come whole sectors around what is wanted."""
    more = SECTORS * ALIGNMENT if chosen.offload_to == "disk" else PADDING
    own = {layer.name: stored_bytes(layer, chosen) + more for layer in component.layers}
    groups = group_layers(component, granularity)
    return {name: -(-sum(own[layer] for layer in layers) // ALIGNMENT) * ALIGNMENT for name, layers in groups.items()}


def choose_resident_layers(
    sizes: Mapping[str, int], capacity: int, ring: int, seconds: Mapping[str, float] | None = None
) -> set[str]:
    """Names of at most `capacity` bytes that had better stay, so that the rest never comes late, or little.

    `sizes` are in their order of use, `seconds` is how long each is at work (None: as their bytes). The rest passes
    through a ring of `ring` bytes. Imagine a link that brings as much in a second as it must: whatever has come by
    the time when it is needed passes through, and the ring bounds how far ahead it can be. Of all such links, the
    slowest that leaves no more than `capacity` to stay is taken.
    """
    if capacity < min(sizes.values(), default=0) and ring >= max(sizes.values(), default=0):
        return set()
    work = sizes if seconds is None else seconds
    total, whole = sum(sizes.values()), sum(work[name] for name in sizes)
    usual = total / whole if whole else 0.0  # bytes per second
    least, most = 0.0, 1000 * usual
    best = set(sizes) if total <= capacity else {name for name, size in sizes.items() if size > ring}
    groups = [(name, size, work[name]) for name, size in sizes.items()]
    while most - least > CLOSE * (most + usual):
        rate = (least + most) / 2
        resident = _late(groups, ring, rate)
        if sum(sizes[name] for name in resident) <= capacity:
            best, most = resident, rate
        else:
            least = rate
    left = capacity - sum(sizes[name] for name in best)
    for name, size in sizes.items():  # what the slowest link leaves over
        if name not in best and size <= left:
            best, left = best | {name}, left - size
    return best


def _late(groups: Sequence[tuple[str, int, float]], ring: int, rate: float) -> set[str]:
    """What would not have come in time at `rate` bytes a second, in the second of two passes."""
    come = float(ring)
    late: set[str] = set()
    for _ in range(2):
        late = set()
        for name, size, seconds in groups:
            if size <= come:
                come -= size
            else:
                late.add(name)
            come += rate * seconds
            come = min(come, ring)
    return late


def _checked(component: Component, chosen: ComponentPlan, sizes: Mapping[str, int]) -> ComponentPlan:
    joined = {layer.name: layer.moves_with for layer in component.layers if layer.moves_with in sizes}
    for name in chosen.resident_layers or ():
        if name not in sizes and name not in joined:
            raise PlanError(unknown_name(f"layer of {component.name}", name, [*sizes, *joined]), name=name)
    resident = {name if name in sizes else joined[name] for name in chosen.resident_layers or ()}
    passing = [size for name, size in sizes.items() if name not in resident]
    ring = chosen.ring_buffer if chosen.ring_buffer is not None else min(AHEAD * max(passing, default=0), sum(passing))
    if ring < max(passing, default=0):
        raise PlanError(
            f"{component.name}: a ring of {format_bytes(ring)} cannot take its largest layer that passes through, of "
            f"{format_bytes(max(passing))}",
            name=component.name,
        )
    return chosen.model_copy(
        update={"ring_buffer": ring, "resident_layers": tuple(name for name in sizes if name in resident)}
    )
