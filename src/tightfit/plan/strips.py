"""How long an autoencoder takes in strips on an accelerator: a way's legs by that accelerator's rates.

This does with numbers what the runner does with maps (apply/activations/strips/runner.py, maps.py): what is computed,
what comes from host memory and what goes there each have an engine of their own, and the host launches ahead.
"""

from __future__ import annotations

from typing import NamedTuple

from tightfit.plan.pace import alone, stretch_of
from tightfit.records import Accelerator, Leg, Phase, Way

__all__ = ["more_seconds", "way_seconds"]


def more_seconds(phase: Phase, way: Way | None, device: Accelerator) -> float:
    """How much longer the passes of `phase` take in strips than whole, where all weights are there."""
    if way is None:
        return 0.0
    passes = (phase.passes[index] for index in phase.order)
    turns = [[turn for use in done.uses for turn in use.turns] for done in passes]
    stretches = ([stretch_of(turn.work, device)._replace(waits=turn.waits) for turn in some] for some in turns)
    whole = phase.pace * sum(map(alone, stretches))
    return len(phase.order) * way_seconds(way, device, phase.pace) - whole


def way_seconds(way: Way, device: Accelerator, pace: float = 1.0) -> float:
    """The seconds of a pass that is done like this; its arithmetic and launches take `pace` times as long as usual."""
    strips = [_strip_of(leg, device, pace) for leg in way.legs]
    clocks = _Clocks()
    for _ in range(way.items):
        for (leg, strip), then in zip(zip(way.legs, strips, strict=True), [*strips[1:], None], strict=True):
            for _ in range(leg.strips - 1):
                clocks.do(strip, strip)
            clocks.do(strip, then)  # what the next leg takes first may come meanwhile
        clocks.settle()
    return clocks.now


class _Strip(NamedTuple):
    """One of those that a leg is done in, in seconds: each is taken to be like the others."""

    ahead: bool
    computing: float
    launching: float
    coming: float
    going: float


def _strip_of(leg: Leg, device: Accelerator, pace: float) -> _Strip:
    link, out = device.link_rate, device.link_rate_out or device.link_rate
    work = stretch_of(leg.work, device)
    return _Strip(
        leg.ahead,
        pace * work.seconds / leg.strips,
        pace * (work.launching + leg.copies * device.launch_overhead) / leg.strips,
        leg.bytes_in / link / leg.strips if link else 0.0,
        leg.bytes_out / out / leg.strips if out else 0.0,
    )


class _Clocks:
    """Of the host, of what is computed, and of both directions of the link."""

    def __init__(self) -> None:
        self.now = self._host = self._inward = self._outward = 0.0
        self._there: float | None = None  # when what the next strip takes is there, if it was sent for

    def do(self, strip: _Strip, following: _Strip | None) -> None:
        """A strip. Where it goes ahead, it sends for what the one after it takes."""
        self._host += strip.launching
        there = self._bring(strip) if self._there is None else self._there
        self.now = max(self.now, there)
        self._there = self._bring(following) if strip.ahead and following else None
        self.now = max(self.now + strip.computing, self._host, self._outward)  # one strip is on its way out at most
        if strip.going:
            self._outward = self.now + strip.going
        if not strip.ahead:
            self.settle()

    def _bring(self, strip: _Strip) -> float:
        """Sends for what `strip` takes; when it is there."""
        if not strip.coming:
            return self.now
        self._inward = max(self._inward, self.now) + strip.coming
        return self._inward

    def settle(self) -> None:
        """All that was kept has left."""
        self.now = max(self.now, self._outward)
