"""Which component works after which in a call: as a plan says, or as in the last call with as many steps."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CallOrder", "Pass"]

Pass = tuple[str, str]  # a component, and its method


class CallOrder:
    """The passes of a call in their order, as far as they are known, and where the call stands."""

    def __init__(self) -> None:
        self._known: dict[int | None, Sequence[Pass]] = {}
        self.begin(None)

    def expect(self, steps: int | None, passes: Sequence[Pass]) -> None:
        """A call that asks for `steps` steps (None: the usual number) will probably work through `passes`."""
        self._known[steps] = tuple(passes)

    def begin(self, steps: int | None) -> None:
        """A call begins."""
        self._steps = steps
        self._seen: list[Pass] = []
        self._right = steps in self._known  # whether everything came as expected so far

    def end(self) -> None:
        """The call has come to its end: the next is expected to be the same."""
        self.expect(self._steps, self._seen)

    def works(self, name: str, method: str) -> None:
        """A pass begins."""
        at = len(self._seen)
        self._seen.append((name, method))
        self._right = self._right and self._known[self._steps][at : at + 1] == ((name, method),)

    @property
    def next(self) -> Pass | None:
        """What comes after the pass that has begun; None where nobody knows, or nothing does."""
        later = self._known[self._steps][len(self._seen) :] if self._right else ()
        return later[0] if later else None
