"""What happens while a fitted pipeline runs: who works, in which phase, and who makes room for whom."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tightfit.apply.activations.sdpa_patch import AttentionHandler, attenders, only_attend
from tightfit.apply.weights.device_managers import DeviceOffloadManagers
from tightfit.measure.modules import find_phase
from tightfit.measure.recorder import Recorder
from tightfit.schema.footprint import Role
from tightfit.schema.results import Trace

__all__ = ["Session"]


class Session:
    """Told when calls and components begin and end; tells the recorder, and where weights are.

    One call at a time: another thread's waits. With `keeps`, what is on the device stays there from call to call.
    """

    def __init__(
        self,
        places: DeviceOffloadManagers,
        recorder: Recorder,
        done: Callable[[Trace], None],
        exceeded: Callable[[int, bool], None],
        *,
        keeps: bool = False,
    ) -> None:
        """`done` is given what was measured of a call; `exceeded` how many bytes of RAM were too many, and whether the
        call is still going on.
        """
        self._places = places
        self._recorder = recorder
        self._done, self._exceeded = done, exceeded
        self._keeps = keeps
        self._turn = threading.RLock()
        self._calls = 0  # that have begun and not ended
        self._clean = True  # whether the last call left everything as it should be
        self.over = False  # whether another plan, or none, is followed by now
        self._working: list[str] = []
        self._attenders: tuple[AttentionHandler, ...] = ()

    @contextlib.contextmanager
    def call(self, steps: int | None = None) -> Iterator[None]:
        """One call of the pipeline, for `steps` steps (None: its usual number). Inside another it is part of that."""
        with self._turn:
            if self._calls:
                yield
                return
            if not self._clean:  # an interruption came while the last call was being cleared up
                self._clear()
            self._attenders = attenders()  # of another pipeline, in whose call this one is made
            self._calls, self._clean = 1, False
            try:
                self._places.begin(steps)
                with self._recorder.call():
                    yield
                    self._tell(self._places.end(), during=False)
                    self._done(self._recorder.trace())
                if self._keeps:
                    self._places.rest()
                    self._clean = True
            finally:
                self._calls = 0
                self._working.clear()
                if not self._clean:
                    self._clear()

    @property
    def busy(self) -> bool:
        """Whether a component is at work."""
        return bool(self._working)

    def at_work(self, name: str) -> bool:
        """Whether the component `name` is."""
        return name in self._working

    def close(self) -> None:
        """Nobody follows the plan any more; nothing is left on the device."""
        self.over = True
        self._places.clear()

    def _clear(self) -> None:
        only_attend(self._attenders)
        self._places.clear()
        self._clean = True

    def _tell(self, held: int, *, during: bool) -> None:
        """The process held so many bytes of RAM, more than it may, `during` a call or at its end; 0: it did not."""
        if held:
            self._exceeded(held, during)
            self._recorder.note("this process held more RAM than it may, and no weights were left that could go")

    @contextlib.contextmanager
    def work(self, name: str, role: Role, method: str = "forward") -> Iterator[None]:
        """The component `name` works; outside a call, its work is a call of its own."""
        with self.call():
            outermost, manager = not self.at_work(name), self._places.of(name)
            if outermost:
                self._tell(manager.keep_within(name), during=True)
                manager.make_room(name)  # what goes belongs to the phase before, what comes to this one
                self._recorder.enter(find_phase(name, role, method))
                manager.bring(name, method)
            self._working.append(name)
            try:
                yield
                if outermost:
                    manager.finish(name)
            finally:
                if self._working:
                    self._working.pop()
                self._recorder.leave()

    def touch(self, name: str) -> None:
        """A part of `name` is about to work without `name` having been called: its weights come all the same."""
        if self.at_work(name):
            return
        manager = self._places.of(name)
        if self._working:  # who uses the part has to stay
            manager.bring(name)
        else:
            manager.enter(name)
