"""Footprint → the order in which components run, and which of them are on a device together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tightfit.plan.layer_selection import paths_to
from tightfit.schema.footprint import ComponentCall, Footprint
from tightfit.schema.plan import ComponentPlan, ComponentRun, Reason

__all__ = [
    "CoResidencyTracker",
    "CoResidentGroup",
    "calls_per_load",
    "co_resident_groups",
    "method_of",
    "prefetch_reasons",
    "schedule_of",
]


ALTERNATIONS = 4  # switches between two components in one pipeline call, after which both remain on the device


class CoResidencyTracker:
    """Which components are on one device at a time, if none of them is always resident.

    When one starts to run, the others are evicted, except those that it alternates with (a ControlNet and its UNet):
    two that switch more than ALTERNATIONS times in a call are on the device together from then on.
    """

    def __init__(self) -> None:
        self.on_device: set[str] = set()
        self.pairs: list[frozenset[str]] = []  # components that are on the device together
        self._switches: Counter[frozenset[str]] = Counter()
        self._last: str | None = None

    def begin_call(self) -> None:
        """Forget what ran and is on the device, but not which components alternate."""
        self.on_device.clear()
        self._switches.clear()
        self._last = None

    def record_run(self, name: str) -> bool:
        """Record that `name` runs; return whether it had to be loaded."""
        if self._last is not None and self._last != name:
            pair = frozenset((name, self._last))
            self._switches[pair] += 1
            if self._switches[pair] > ALTERNATIONS and pair not in self.pairs:
                self.pairs.append(pair)
        self._last = name
        self.on_device = {other for other in self.on_device if self.share(name, other)}
        loaded = name not in self.on_device
        self.on_device.add(name)
        return loaded

    def share(self, one: str, other: str) -> bool:
        """Whether both components are on the device together."""
        return one == other or frozenset((one, other)) in self.pairs


class CoResidentGroup(NamedTuple):
    """Components that are on the device together, and the indices of the phases in which they are."""

    names: tuple[str, ...]
    phases: tuple[int, ...]


def co_resident_groups(footprint: Footprint) -> list[CoResidentGroup]:
    """Return the groups of components that are on the device together, if none of them is always resident."""
    order = [phase.calls[index].component for phase in footprint.phases for index in phase.call_order]
    tracker = CoResidencyTracker()
    for name in order:
        tracker.record_run(name)
    groups = {name: {name} for name in order}
    for pair in tracker.pairs:
        together = set().union(*(groups[name] for name in pair))
        groups |= dict.fromkeys(together, together)
    distinct = {frozenset(group): tuple(sorted(group, key=order.index)) for group in groups.values()}
    return [CoResidentGroup(names, _phases_of(footprint, names)) for names in distinct.values()]


def _phases_of(footprint: Footprint, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the phases in which any of `names` runs, or no component of this device: what is loaded remains."""
    running = [{call.component for call in phase.calls} for phase in footprint.phases]
    return tuple(number for number, used in enumerate(running) if used.intersection(names) or not used)


def calls_per_load(footprint: Footprint) -> dict[str, tuple[int, ...]]:
    """Return for each component its number of calls each time that it is loaded, if it is not always resident."""
    tracker, passes = CoResidencyTracker(), dict[str, list[int]]()
    for call in (phase.calls[index] for phase in footprint.phases for index in phase.call_order):
        own = passes.setdefault(call.component, [])
        own += [0] if tracker.record_run(call.component) else []
        own[-1] += 1
    return {name: tuple(counts) for name, counts in passes.items()}


_METHODS = ("forward", "encode", "decode")  # of whole components; a submodule called directly counts as forward


def schedule_of(footprint: Footprint) -> tuple[ComponentRun, ...]:
    """Return the order in which components run, as groups of consecutive calls."""
    passes = [phase.calls[index] for phase in footprint.phases for index in phase.call_order]
    unused = {key: _unused(footprint, key) for key in dict.fromkeys(map(method_of, passes))}
    return tuple(
        ComponentRun(component=key[0], method=key[1], runs=len(list(group)), unused_blocks=unused[key])
        for key, group in itertools.groupby(passes, key=method_of)
    )


def method_of(call: ComponentCall) -> tuple[str, str]:
    """Return the component and the method of a call."""
    return call.component, call.method if call.method in _METHODS else "forward"


def _unused(footprint: Footprint, key: tuple[str, str]) -> tuple[str, ...]:
    """Return the paths of the largest submodules of a component that one of its methods does not use."""
    passes = (call for phase in footprint.phases for call in phase.calls if method_of(call) == key)
    used = {
        path
        for call in passes
        for use in call.block_uses
        for layer_work in use.layer_work
        for path in paths_to(layer_work.layer)
    }
    layers = (layer.name for c in footprint.components if c.name == key[0] for layer in c.layers)
    roots = (next((path for path in paths_to(layer) if path not in used), None) for layer in layers)
    return tuple(root for root in dict.fromkeys(roots) if root is not None)


def prefetch_reasons(order: Sequence[ComponentRun], components: Mapping[str, ComponentPlan]) -> Iterator[Reason]:
    """Yield which components are prefetched while the one before on their device finishes, and why that is possible."""
    last: dict[str | None, str] = {}
    pairs: dict[str, str] = {}
    for run in order:
        name = run.component
        before = last.get(components[name].device)
        stay = "resident" in {components[each].placement for each in (name, before or name)}
        if before not in (None, name) and not stay and run.prefetch != 0:
            pairs.setdefault(name, f"{name} after {before}")
        last[components[name].device] = name
    if pairs:
        said = ", ".join(pairs.values())
        because = "that call frees its memory layer by layer"
        yield Reason(decision=f"the next component is loaded during the last call before it: {said}", because=because)
