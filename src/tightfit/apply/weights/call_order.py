"""Order of component calls in a pipeline call: from the plan, or from the last call with the same number of steps."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CallKey", "CallOrder"]

CallKey = tuple[str, str]  # a component's name, and its method


class CallOrder:
    """Expected component calls of a pipeline call, in order, and the current position."""

    def __init__(self) -> None:
        self._known: dict[int | None, Sequence[CallKey]] = {}
        self.begin(None)

    def expect(self, steps: int | None, passes: Sequence[CallKey]) -> None:
        """Expect `passes` in calls with `steps` steps (None: the default number)."""
        self._known[steps] = tuple(passes)

    def begin(self, steps: int | None) -> None:
        """Begin a call."""
        self._steps = steps
        self._seen: list[CallKey] = []
        self._right = steps in self._known  # whether all component calls so far were as expected

    def end(self) -> None:
        """End the call; the next with as many steps is expected to be the same."""
        self.expect(self._steps, self._seen)

    def begin_call(self, name: str, method: str) -> None:
        """Begin a component call."""
        at = len(self._seen)
        self._seen.append((name, method))
        self._right = self._right and self._known[self._steps][at : at + 1] == ((name, method),)

    @property
    def next(self) -> CallKey | None:
        """The component call after the current one; None where there is none or it is unknown."""
        later = self._known[self._steps][len(self._seen) :] if self._right else ()
        return later[0] if later else None
