"""How long work takes on an accelerator: a footprint's counts by that accelerator's rates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tightfit.plan.streaming import group_leaves
from tightfit.records import Accelerator, Component, Footprint, Grain, Pass, Use, Workload

__all__ = ["Pace", "Stretch", "alone", "stretch_of"]


class Stretch(NamedTuple):
    """What is done while one leaf, or what it moves together with, is needed, or nothing that moves ("")."""

    parcel: str
    seconds: float  # of the device
    launching: float  # seconds of the host, ahead of that
    waits: bool = False  # whether the host waits for it at its end


def stretch_of(work: Iterable[Workload], device: Accelerator, parcel: str = "") -> Stretch:
    """Kernels one after another on `device`; what has no rate takes no time."""
    seconds = launching = 0.0
    for kernels in work:
        rate = device.arithmetic_rate(kernels.kind, kernels.dtype)
        arithmetic = kernels.operations / rate if rate else 0.0
        seconds += max(arithmetic, kernels.traffic / device.memory_rate if device.memory_rate else 0.0)
        launching += kernels.kernels * device.launch_overhead
    return Stretch(parcel, seconds + launching if device.is_cpu else seconds, launching)


def alone(stretches: Iterable[Stretch]) -> float:
    """The seconds of a pass that waits for no weights."""
    seconds = launching = 0.0
    for stretch in stretches:
        seconds, launching = seconds + stretch.seconds, launching + stretch.launching
        if stretch.waits:
            seconds = launching = max(seconds, launching)
    return max(seconds, launching)


class Pace:
    """The passes of `component` on `device`, each worked out once."""

    def __init__(self, component: Component, device: Accelerator) -> None:
        self._device = device
        self._parcels = {grain: _parcels(component, grain) for grain in ("leaf", "block")}
        self._known: dict[tuple[int, Grain], tuple[Pass, list[Stretch]]] = {}

    def stretches(self, done: Pass, grain: Grain = "leaf") -> list[Stretch]:
        """A pass from its beginning to its end, with all weights there, by what moves together.

        A block's layers are needed from its beginning on.
        """
        key = id(done), grain
        if key not in self._known:
            self._known[key] = done, self._joined(done, grain)  # with the pass, whose id stays its own
        return self._known[key][1]

    def _joined(self, done: Pass, grain: Grain) -> list[Stretch]:
        parcels, joined = self._parcels[grain], list[Stretch]()
        for use in done.uses:
            for turn in use.turns:
                plain = stretch_of(turn.work, self._device, _parcel(parcels, use, turn.leaf))
                found = Stretch(plain.parcel, plain.seconds * done.pace, plain.launching * done.pace, turn.waits)
                if joined and joined[-1].parcel == found.parcel and not joined[-1].waits:
                    before = joined.pop()
                    seconds, launching = before.seconds + found.seconds, before.launching + found.launching
                    found = found._replace(seconds=seconds, launching=launching)
                joined.append(found)
        return joined

    def leaf_seconds(self, footprint: Footprint, component: Component) -> dict[str, float] | None:
        """Seconds from the time when a leaf is needed until the next one is, in all kinds of passes together.

        None where the footprint was measured for no request.
        """
        passes = [done for phase in footprint.phases for done in phase.passes if done.component == component.name]
        if not passes:
            return None
        spent = dict.fromkeys((leaf.name for leaf in component.leaves), 0.0)
        for done in passes:
            needed = None
            for stretch in self.stretches(done):
                needed = stretch.parcel or needed
                if needed is not None:
                    spent[needed] += stretch.seconds
        return spent


def _parcels(component: Component, grain: Grain) -> dict[str, str]:
    """What each leaf moves together with."""
    return {leaf: parcel for parcel, leaves in group_leaves(component, grain).items() for leaf in leaves}


def _parcel(parcels: dict[str, str], use: Use, leaf: str) -> str:
    return use.unit if use.unit in parcels.values() else parcels.get(leaf, "")
