"""What happens while a fitted pipeline runs: who works, in which phase, and who makes room for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tightfit.apply.weights.placement import Residency
from tightfit.footprint import Role
from tightfit.measure.modules import find_phase
from tightfit.measure.recorder import Recorder
from tightfit.records import Trace

__all__ = ["Session"]


class Session:
    """Told when calls and components begin and end; tells the residency and the recorder."""

    def __init__(self, residency: Residency, recorder: Recorder, done: Callable[[Trace], None]) -> None:
        self._residency = residency
        self._recorder = recorder
        self._done = done
        self._working: list[str] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One call of the pipeline. Inside another it is part of that one."""
        if self._recorder.running:
            yield
            return
        with self._recorder.call():
            try:
                yield
                self._done(self._recorder.trace())
            finally:
                self._residency.clear()

    @contextlib.contextmanager
    def work(self, name: str, role: Role, method: str = "forward") -> Iterator[None]:
        """The component `name` works; outside a call, its work is a call of its own."""
        with self.call():
            if name not in self._working:
                self._residency.make_room(name)  # what goes belongs to the phase before, what comes to this one
                self._recorder.enter(find_phase(name, role, method))
                self._residency.bring(name)
            self._working.append(name)
            try:
                yield
            finally:
                self._working.pop()
                self._recorder.leave()

    def touch(self, name: str) -> None:
        """A part of `name` is about to work without `name` having been called: its weights come all the same."""
        if name not in self._working:
            self._residency.enter(name)
