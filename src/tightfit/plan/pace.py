"""How long a component's passes take on an accelerator, by what of its weights each moment of them needs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from tightfit.plan.streaming import group_leaves
from tightfit.plan.stretches import Lap, Stretch, alone, joined, stretch_of
from tightfit.plan.strips import seconds_alone
from tightfit.records import Accelerator, Component, Footprint, Grain, Leg, Pass, Turn, Use, Way

__all__ = ["Pace"]


class Pace:
    """The passes of `component` on `device`, each worked out once."""

    def __init__(self, component: Component, device: Accelerator) -> None:
        self._device = device
        self._parcels = {grain: _parcels(component, grain) for grain in ("leaf", "block")}
        self._known: dict[tuple[int, Grain], tuple[Pass, list[Stretch]]] = {}
        self._laps: dict[tuple[int, float, Grain | None], tuple[Way, list[Lap]]] = {}
        self._alone: dict[tuple[int, float, Grain | None], tuple[Way, float]] = {}

    def stretches(self, done: Pass, grain: Grain = "leaf") -> list[Stretch]:
        """A pass from its beginning to its end, with all weights there, by what moves together.

        A block's layers are needed from its beginning on.
        """
        key = id(done), grain
        if key not in self._known:
            self._known[key] = done, self._joined(done, grain)  # with the pass, whose id stays its own
        return self._known[key][1]

    def _joined(self, done: Pass, grain: Grain) -> list[Stretch]:
        parcels = self._parcels[grain]
        turns = ((turn, _parcel(parcels, use, turn.leaf)) for use in done.uses for turn in use.turns)
        plain = (self._stretch(turn, parcel, grain)._replace(waits=turn.waits) for turn, parcel in turns)
        return joined(plain, done.pace)

    def laps(self, way: Way, pace: float, grain: Grain | None) -> list[Lap]:
        """A pass done in this way, at the pass's own `pace`; without a `grain`, with all weights there."""
        key = id(way), pace, grain
        if key not in self._laps:
            self._laps[key] = way, [self._lap(leg, pace, grain) for leg in way.legs]
        return self._laps[key][1]

    def alone(self, done: Pass, way: Way | None = None, grain: Grain | None = None) -> float:
        """The seconds of a pass that waits for no weights, if it is done in this way.

        With a `grain` weights came before it, and are told of each use.
        """
        overhead = self._device.resident_overhead if grain else 0.0
        if way is None:
            return alone(self.stretches(done, grain or "leaf"), overhead)
        grain = grain if overhead else None
        key = id(way), done.pace, grain
        if key not in self._alone:
            self._alone[key] = way, seconds_alone(self.laps(way, done.pace, grain), way.items, overhead)
        return self._alone[key][1]

    def _lap(self, leg: Leg, pace: float, grain: Grain | None) -> Lap:
        parcels = self._parcels[grain] if grain else {}

        def stretches(turns: Iterable[Turn], share: float) -> list[Stretch]:
            return joined((self._stretch(turn, parcels.get(turn.leaf, ""), grain) for turn in turns), share)

        by_runs = groupby(zip(leg.runs, leg.turns, strict=True), lambda both: both[0])
        link, out = self._device.link_rate, self._device.link_rate_out or self._device.link_rate
        return Lap(
            leg.strips,
            leg.ahead,
            stretches(leg.once, pace),
            [(runs, found) for runs, some in by_runs for found in stretches((t for _, t in some), pace / runs)],
            pace * leg.copies * self._device.launch_overhead / leg.strips,
            leg.bytes_in / link / leg.strips if link else 0.0,
            leg.bytes_out / out / leg.strips if out else 0.0,
        )

    def _stretch(self, turn: Turn, parcel: str, grain: Grain | None) -> Stretch:
        gate = turn.leaf if parcel and grain == "leaf" else ""
        return stretch_of(turn.work, self._device, parcel)._replace(gate=gate)

    def expected(self, grain: Grain) -> list[str]:
        """What moves together, in the order of the model, as often as it is told to be needed."""
        parcels = list(self._parcels[grain].values())
        return parcels if grain == "leaf" else list(dict.fromkeys(parcels))

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
