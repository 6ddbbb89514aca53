"""Weight groups of a streamed component: which of them are resident, and how large the ring buffer for the others is.

The order of use is a known cycle, so resident are those groups that an imagined, slower link would deliver late: then
some group is always being loaded while others compute, and the ring buffer can be small. (Least recently used is the
worst policy for a cycle: it evicts each layer just before its next use.)
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

ALIGNMENT = 4096  # bytes: sizes in the ring buffer are rounded up to it
AHEAD = 4  # preferred size of the ring buffer: how many of the largest groups that pass through it holds
CLOSE = 1e-4  # relative precision of the rate of the slowest link
BLOCKS_FROM = 40  # number of blocks for which there must be memory before whole blocks are loaded


class MemorySplit(NamedTuple):
    """Division of some bytes for weights."""

    resident: frozenset[str]  # groups that are resident because they are large
    resident_bytes: int  # bytes of these
    ring: int  # bytes of the ring buffer
    largest: int  # bytes of the largest other group
    spare: int = 0  # bytes for more resident groups

    @property
    def min_bytes(self) -> int:
        """Fewest bytes of it that are used: less than the largest group that passes through is left over."""
        return self.resident_bytes + self.ring + max(self.spare - self.largest, 0)


class WeightGroupSizes:
    """Bytes of weight groups by name, in the order of the model."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.whole = sizes, sum(sizes.values())
        self.largest = max(sizes.values(), default=0)

    @cached_property
    def order(self) -> list[str]:
        """Names from the largest to the smallest."""
        return sorted(self.sizes, key=lambda name: -self.sizes[name])

    @property
    def min_bytes(self) -> int:
        """Fewest bytes with which the groups can be streamed."""
        return self._splits[-1].min_bytes

    @property
    def preferred_bytes(self) -> int:
        """Fewest bytes with which the ring buffer has its preferred size, for AHEAD groups."""
        return self._splits[0].min_bytes

    def divide(self, capacity: int) -> MemorySplit:
        """Return how `capacity` bytes are divided. `spare` is negative if they are too few."""
        if capacity >= self.whole:
            return MemorySplit(frozenset(self.sizes), self.whole, 0, 0)
        preferred, *tighter = self._splits
        if capacity >= preferred.min_bytes:
            return preferred._replace(spare=capacity - preferred.min_bytes)
        for split in tighter:  # the remaining bytes are for the ring buffer
            if capacity >= split.min_bytes:
                return split._replace(ring=capacity - split.resident_bytes)
        return preferred._replace(spare=capacity - self.min_bytes)

    @cached_property
    def _splits(self) -> list[MemorySplit]:
        """Divisions with a ring buffer for AHEAD of the largest passing groups, down to 1: each in the fewest bytes."""
        return [self._split(ahead) for ahead in range(AHEAD, 0, -1)]

    def _split(self, ahead: int) -> MemorySplit:
        count, best, resident_bytes, passing = len(self.order), (self.whole, 0, 0), 0, self.whole
        for number, name in enumerate(self.order):
            size = self.sizes[name]
            ring = min(ahead * size, passing)
            if resident_bytes + ring < sum(best[:2]):
                count, best = number, (resident_bytes, ring, size)
            resident_bytes, passing = resident_bytes + size, passing - size
        return MemorySplit(frozenset(self.order[:count]), *best)


def group_layers(component: Component, granularity: Granularity) -> dict[str, list[str]]:
    """Return the layers that are loaded together, by the name of their group, in the order of the model."""
    blocks = {block.name for block in component.blocks if block.name} if granularity == "block" else set()
    groups: dict[str, list[str]] = {}
    for layer in component.layers:
        alone = layer.moves_with or layer.name
        groups.setdefault(next((path for path in paths_to(layer.name) if path in blocks), alone), []).append(layer.name)
    return groups


def paths_to(name: str) -> Iterator[str]:
    """Yield the dotted paths of all modules around `name`, the outermost first, and `name` itself."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def resolve_streaming(
    component: Component, chosen: ComponentPlan, seconds: Mapping[str, float] | None = None
) -> ComponentPlan:
    """Return `chosen` with its granularity, ring buffer and resident layers resolved, where it leaves them open.

    `seconds` is the compute time of each of the component's layers; None: proportional to their bytes.
    Raises PlanError if `weight_memory` or `ring_buffer` is too small, with what would be enough, for unknown
    `resident_layers`, and for granularity "layer" of a compiled component.
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
    capacity = groups.preferred_bytes if chosen.weight_memory is None else chosen.weight_memory - small_bytes
    if capacity >= groups.whole:
        return chosen.model_copy(update={"granularity": granularity, "resident_layers": tuple(sizes), "ring_buffer": 0})
    split = groups.divide(capacity)
    if split.spare < 0:
        raise _too_little(component, chosen, small_bytes, small_bytes + groups.min_bytes)
    left = split.ring + split.spare
    ring = split.ring if chosen.ring_buffer is None else min(chosen.ring_buffer, left)
    passing = {name: size for name, size in sizes.items() if name not in split.resident}
    resident = choose_resident_layers(passing, left - ring, ring, _by_group(component, granularity, seconds)).union(
        split.resident
    )
    if (taken := sum(sizes[name] for name in resident) + ring) > capacity:
        raise PlanError(
            f"{component.name}: a ring of {format_bytes(ring)} cannot take what is larger, and if all that stays, "
            f"its weights take {format_bytes(small_bytes + taken)}, not {format_bytes(small_bytes + capacity)}: "
            f"a ring of {format_bytes(split.ring)} would do",
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
    """Return the bytes of tensors outside of layers, which are on the device while the component runs."""
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
    """Choose without trying both: blocks if compiled or if `weight_memory` holds BLOCKS_FROM of them, else layers.

    The smaller the groups that pass through, the more can be resident.
    """
    if chosen.resident_layers:  # the granularity follows from their names
        whole = {block.name for block in component.blocks} - {layer.name for layer in component.layers}
        return "block" if whole.intersection(chosen.resident_layers) else "layer"
    if component.compiled:
        return "block"
    if chosen.weight_memory is None:
        return "layer"
    largest = max(weight_group_sizes(component, "block", chosen).values(), default=0)
    return "block" if chosen.weight_memory - small_tensor_bytes(component) >= BLOCKS_FROM * largest else "layer"


def weight_group_sizes(component: Component, granularity: Granularity, chosen: ComponentPlan) -> dict[str, int]:
    """Return the bytes of each weight group in the ring buffer, with what aligns them there."""
    own = {layer.name: stored_bytes(layer, chosen) + chosen.store.padding for layer in component.layers}
    groups = group_layers(component, granularity)
    return {name: -(-sum(own[layer] for layer in layers) // ALIGNMENT) * ALIGNMENT for name, layers in groups.items()}


def choose_resident_layers(
    sizes: Mapping[str, int], capacity: int, ring: int, seconds: Mapping[str, float] | None = None
) -> set[str]:
    """Return names of at most `capacity` bytes to keep resident, so that the others are loaded in time or little late.

    `sizes` are bytes in order of use, `seconds` the compute time of each (None: proportional to bytes). The others
    pass through a ring buffer of `ring` bytes. For a link of a given rate, a group passes through if it is loaded by
    the time it is needed, where the ring buffer bounds how far ahead loading can be; else it is resident. Of all
    rates, the slowest that leaves at most `capacity` bytes resident is taken.
    """
    if capacity < min(sizes.values(), default=0) and ring >= max(sizes.values(), default=0):
        return set()
    work = sizes if seconds is None else seconds
    total, whole = sum(sizes.values()), sum(work[name] for name in sizes)
    average = total / whole if whole else 0.0  # bytes per second
    least, most = 0.0, 1000 * average
    best = set(sizes) if total <= capacity else {name for name, size in sizes.items() if size > ring}
    groups = [(name, size, work[name]) for name, size in sizes.items()]
    while most - least > CLOSE * (most + average):
        rate = (least + most) / 2
        resident = _late(groups, ring, rate)
        if sum(sizes[name] for name in resident) <= capacity:
            best, most = resident, rate
        else:
            least = rate
    left = capacity - sum(sizes[name] for name in best)
    for name, size in sizes.items():  # use the bytes that are left over
        if name not in best and size <= left:
            best, left = best | {name}, left - size
    return best


def _late(groups: Sequence[tuple[str, int, float]], ring: int, rate: float) -> set[str]:
    """Return what would not be loaded in time at `rate` bytes per second, in the second of two calls."""
    bytes_ahead = float(ring)
    late: set[str] = set()
    for _ in range(2):
        late = set()
        for name, size, seconds in groups:
            if size <= bytes_ahead:
                bytes_ahead -= size
            else:
                late.add(name)
            bytes_ahead += rate * seconds
            bytes_ahead = min(bytes_ahead, ring)
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
