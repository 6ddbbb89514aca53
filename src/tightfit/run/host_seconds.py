"""How much of the time of a simulated call is the host's work on its critical path, by phase."""

from __future__ import annotations

from collections import defaultdict

from tightfit.measure.recorder import Recorder
from tightfit.simulator.card import SimulatedCard

__all__ = ["HostSeconds"]


class HostSeconds:
    """Of a call on `card` that `recorder` divides into phases; to be called at each kernel."""

    def __init__(self, card: SimulatedCard, recorder: Recorder) -> None:
        self._card, self._recorder = card, recorder
        self._phase, self._last = "", card.end.host  # at the last kernel
        self._nanoseconds: defaultdict[str, int] = defaultdict(int)

    def __call__(self, kernel: object) -> None:
        self._count()
        self._phase = self._recorder.live().phase

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase since this was made; what came before the first phase belongs to it."""
        self._count()
        early = self._nanoseconds.pop("", 0)
        found = {name: max(spent, 0) * 1e-9 for name, spent in self._nanoseconds.items()}
        for name in list(found)[:1]:
            found[name] += early * 1e-9
        return found

    def _count(self) -> None:
        """Add what was spent since the last kernel to the phase of that kernel."""
        now = self._card.end.host
        self._nanoseconds[self._phase] += now - self._last
        self._last = now
