"""Component that is not always resident → all plans that are tried for it, each with the least bytes that it takes.

There are finitely many, and which there are does not depend on a budget: so what fits a smaller budget fits a larger
one, and a larger budget is never slower. All this is known before compute times of layers are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from tightfit.plan.component_cost import device_bytes_of, round_up
from tightfit.plan.layer_selection import WeightGroupSizes, choose_resident_layers, small_tensor_bytes
from tightfit.schema.footprint import Component
from tightfit.schema.plan import ComponentPlan, Granularity

__all__ = ["Candidate", "candidates"]

Seconds = Mapping[str, float] | None  # compute time of each layer

FEW = 8  # most weight groups of which all selections of resident ones are tried
OVERSIZED_LAYERS = 5  # at most this many layers are resident for their size, …
OVERSIZED_RATIO = 1.5  # … if they are at least this many times as large as the next one, …
SHARES = 4  # … together with none to three fourths of the rest
RING_SIZES = (1, 2, 4)  # sizes of the ring buffer: how many of the largest of the rest it holds


class Candidate(NamedTuple):
    """A plan, or what is known of it before resident layers are chosen by their compute times."""

    plan: ComponentPlan
    streamed_bytes: int  # bytes of resident layers and ring buffer
    exact: bool = True  # False: `streamed_bytes` is a lower bound
    resolve: Callable[[Seconds], Candidate] | None = None  # returns it with more resident layers

    def plan_by_times(self, seconds: Seconds) -> ComponentPlan:
        """Return the plan, with resident layers chosen by `seconds` if that is to be done already."""
        return self.plan if self.resolve is None else self.resolve(seconds).plan


def candidates(
    component: Component,
    whole: ComponentPlan,
    groups: Mapping[Granularity, WeightGroupSizes],
    count: int,
    *,
    by_blocks: bool,
) -> Iterator[Candidate]:
    """Yield `whole` (loaded for its phase), streamed plans of `count` sizes, and streamed plans with chosen residents.

    Streamed plans move single layers, or blocks: then the ring buffer holds a whole block, which needs more memory, but
    a component that runs on parts of a batch block by block loads each block once for all parts.

    With `by_blocks`, which needs placement "stream", they include one with all layers resident.
    """
    layers = groups["layer"]
    yield Candidate(whole, device_bytes_of(layers.sizes.values(), 0))
    if component.layers:
        granularities: list[Granularity] = [
            granularity for granularity in groups if _may_move(component, granularity, groups)
        ]
        stream_plans = {
            granularity: whole.model_copy(update={"placement": "stream", "granularity": granularity})
            for granularity in granularities
        }
        if by_blocks:
            yield _with_all_resident(stream_plans[granularities[0]], groups[granularities[0]])
        for granularity, stream_plan in stream_plans.items():
            yield from _of_sizes(component, stream_plan, groups[granularity], count)
            if len(groups[granularity].sizes) <= FEW and not component.compiled:
                yield from _with_any_resident(stream_plan, groups[granularity])
            elif granularity == "layer":
                yield from _with_oversized_resident(stream_plan, groups[granularity])


def _may_move(component: Component, granularity: Granularity, groups: Mapping[Granularity, WeightGroupSizes]) -> bool:
    """Whether weights may move at `granularity`: if compiled, only blocks; else layers, or blocks of several layers."""
    if granularity == "layer":
        return not component.compiled
    return component.compiled or len(groups["block"].sizes) < len(groups["layer"].sizes)


def _of_sizes(
    component: Component, stream_plan: ComponentPlan, groups: WeightGroupSizes, count: int
) -> Iterator[Candidate]:
    """Yield plans of `count` sizes from the least that a component can stream with to all of it, by equal factors."""
    small_bytes = small_tensor_bytes(component)
    least, most = small_bytes + groups.min_bytes, small_bytes + groups.whole
    sizes = {int(least * (most / least) ** (step / count)) for step in range(count)} if least < most else set()
    for size in sorted(sizes):
        split = groups.divide(size - small_bytes)
        plan = stream_plan.model_copy(update={"weight_memory": size})
        if split.spare:
            yield Candidate(plan, round_up(split.min_bytes), exact=False)
        else:
            yield Candidate(plan, _streamed_bytes(groups, split.resident, split.ring))


def _with_any_resident(stream_plan: ComponentPlan, groups: WeightGroupSizes) -> Iterator[Candidate]:
    for count in range(len(groups.sizes)):
        for resident in itertools.combinations(groups.sizes, count):
            for ahead in RING_SIZES:
                yield _with_resident(stream_plan, groups, frozenset(resident), ahead)


def _with_all_resident(stream_plan: ComponentPlan, groups: WeightGroupSizes) -> Candidate:
    plan = stream_plan.model_copy(update={"resident_layers": tuple(groups.sizes), "ring_buffer": 0})
    return Candidate(plan, device_bytes_of(groups.sizes.values(), 0))


def _with_oversized_resident(stream_plan: ComponentPlan, layers: WeightGroupSizes) -> Iterator[Candidate]:
    """Yield plans in which layers much larger than all others are resident, with some of the rest."""
    sizes = layers.sizes
    for count in range(1, OVERSIZED_LAYERS + 1):
        oversized, next_size = frozenset(layers.order[:count]), sizes[layers.order[count]]
        if sizes[layers.order[count - 1]] < OVERSIZED_RATIO * next_size:
            continue
        rest = {name: size for name, size in sizes.items() if name not in oversized}
        for ahead, share in itertools.product(RING_SIZES, range(SHARES)):
            capacity = max(sum(rest.values()) - ahead * next_size, 0) * share // SHARES
            yield _with_more_resident(stream_plan, layers, oversized, rest, capacity, ahead)


def _with_more_resident(
    stream_plan: ComponentPlan,
    layers: WeightGroupSizes,
    oversized: Set[str],
    rest: Mapping[str, int],
    capacity: int,
    ahead: int,
) -> Candidate:
    """Return the candidate in which up to `capacity` bytes of the rest are resident, too."""
    largest = max(rest.values())

    def resolve(seconds: Seconds) -> Candidate:
        return _with_resident(
            stream_plan, layers, oversized | choose_resident_layers(rest, capacity, ahead * largest, seconds), ahead
        )

    if capacity < min(rest.values()):
        return resolve(None)
    least = layers.whole - sum(rest.values()) + capacity - largest  # less than `largest` is left over
    return Candidate(stream_plan, round_up(max(least, 0)), exact=False, resolve=resolve)


def _with_resident(stream_plan: ComponentPlan, groups: WeightGroupSizes, resident: Set[str], ahead: int) -> Candidate:
    """Return the candidate in which exactly these are resident."""
    passing = (groups.sizes[name] for name in groups.order if name not in resident)
    ring = sum(itertools.islice(passing, ahead))
    named = tuple(name for name in groups.sizes if name in resident)
    plan = stream_plan.model_copy(update={"resident_layers": named, "ring_buffer": ring})
    return Candidate(plan, _streamed_bytes(groups, resident, ring))


def _streamed_bytes(groups: WeightGroupSizes, resident: Set[str], ring: int) -> int:
    return device_bytes_of((size for name, size in groups.sizes.items() if name in resident), ring)
