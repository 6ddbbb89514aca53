"""Search over split networks whose parts work at the same time, on different chunks of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tightfit.plan.compute_segments import segment_of
from tightfit.plan.multi_device_search import MultiDeviceSearch
from tightfit.plan.network_parts import order_of, part_finder
from tightfit.plan.overlap import paired_runs
from tightfit.plan.splitting import WORTH, Splits, SplitSolution, can_split, chains, solve, splits_by_memory
from tightfit.schema.footprint import Component, ComponentCall, Footprint
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, NetworkPart, Plan

__all__ = ["best_overlap"]


def best_overlap(
    search: MultiDeviceSearch, ram: int | None, usual: float, known: Splits, plan_of: Callable[[SplitSolution], Plan]
) -> SplitSolution | None:
    """Return the fastest solution in which denoisers are split and their parts work at the same time.

    None: there is none, or it gains too little on the `usual` seconds of the best one otherwise, in which `known` are
    split. `plan_of` makes the plan of a solution, whose forecast says how long it takes; `ram`: as for
    `MultiDeviceSearch.best`.
    """
    encoders = {name: chosen for name, chosen in known.items() if name not in search.footprint.denoisers}
    others = [{}, encoders] if encoders else [{}]
    best, seconds = None, usual * (1 - WORTH)
    for footprint, fields in _ways(search.footprint):
        varied = search.with_footprint(footprint)
        tried = [{**also, **splits} for splits in _candidates(search, varied, fields) for also in others]
        for splits in tried:
            solution = solve(varied, splits, ram, None)
            if solution is None:
                continue
            taken = sum(phase.seconds for phase in plan_of(solution).forecast)
            if taken < seconds:
                best, seconds = solution._replace(found=solution.found._replace(seconds=taken)), taken
    return best


def _ways(footprint: Footprint) -> Iterator[tuple[Footprint, dict[str, object]]]:
    """Yield ways to compute a denoiser's batches in chunks: the footprint of each, and the fields of its plan."""
    for variant in footprint.variants:
        if variant.splits_batch and not variant.by_blocks and variant.ffn_chunk is None:
            yield footprint.with_variant(variant), {"cfg": variant.cfg, "max_batch": variant.max_batch}
    if footprint.denoisers and all(paired_runs(footprint, name) for name in footprint.denoisers):
        items = footprint.request.batch if footprint.request else 1
        yield footprint, {"cfg": "batched", "max_batch": items}


def _candidates(search: MultiDeviceSearch, varied: MultiDeviceSearch, fields: Mapping[str, object]) -> Iterator[Splits]:
    """Yield splits of all denoisers: into parts that take equally long, and those nearest to the devices' memory."""
    footprint = search.footprint
    components = [component for component in footprint.components if component.name in footprint.denoisers]
    if not components or not all(can_split(search, component) for component in components):
        return
    calls = {component.name: _calls(search, component) for component in components}
    after = {name: _after_blocks(some) for name, some in calls.items()}
    if not all(after.values()):
        return
    names, tried = list(calls), list[Splits]()
    for devices in chains(search, names):
        cards = [search.members[number].device for number in devices]
        even = {each.name: _even_split(each, calls[each.name], cards) for each in components}
        for splits in (even, *splits_by_memory(varied, names, devices)):
            known = {name: _in_chunks(chosen, after[name], fields) for name, chosen in splits.items() if chosen}
            if len(known) == len(names) and known not in tried:
                tried.append(known)
                yield known


def _in_chunks(chosen: ComponentPlan, after: tuple[str, ...], fields: Mapping[str, object]) -> ComponentPlan:
    """Return the split `chosen` with calls in chunks, as `fields` say, and `after` where the last blocks are."""
    last = list(chosen.split)[-1]
    split = chosen.split | {last: chosen.split[last].model_copy(update={"outside": after})}
    return chosen.model_copy(update={"split": split, **fields})


def _even_split(
    component: Component, calls: Sequence[ComponentCall], cards: Sequence[Accelerator]
) -> ComponentPlan | None:
    """Return the split of `component` over `cards` of which all parts take about equally long; None: too few blocks."""
    order = order_of(component)
    speeds = [1 / max(_seconds(calls, card), 1e-12) for card in cards]
    whole, firsts = _seconds(calls, cards[0]), list[str]()
    before = {block: _seconds(calls, cards[0], part_finder(order, [NetworkPart(first=block)])) for block in order[1:]}
    for count in range(1, len(cards)):
        share = sum(speeds[:count]) / sum(speeds)
        firsts.append(min(before, key=lambda block: abs(before[block] - share * whole)))
    if len(set(firsts)) < len(firsts):
        return None
    first, *later = [card.name for card in cards]
    split = {device: NetworkPart(first=block) for device, block in zip(later, firsts, strict=True)}
    return ComponentPlan(device=first, split=split)


def _seconds(calls: Sequence[ComponentCall], card: Accelerator, part: Callable[[str], int] = lambda path: 0) -> float:
    """Return the seconds that `card` takes for the blocks of `calls` that are in the first `part`."""
    uses = (use for call in calls for use in call.block_uses if use.block and part(use.block) == 0)
    return sum(segment_of(use.work, card).seconds for use in uses)


def _calls(search: MultiDeviceSearch, component: Component) -> list[ComponentCall]:
    phases = search.footprint.phases
    return [call for phase in phases for call in phase.calls if call.component == component.name]


def _after_blocks(calls: Sequence[ComponentCall]) -> tuple[str, ...]:
    """Return the modules that run after the last block in all of `calls`."""
    first, *others = calls
    return tuple(path for path in first.after_blocks if all(path in call.after_blocks for call in others))
