"""The clock of a simulated card: a host that launches work, streams in order, and engines that do it; nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Host", "Point", "Time", "Timeline"]


class Time(NamedTuple):
    """A time in nanoseconds, and how many of them the host worked on the critical path to it.

    How much later that time would be on a slower host follows from the second.
    """

    now: int = 0
    host: int = 0

    def after(self, duration: int, host: int = 0) -> Time:
        """The time `duration` later, in which the host works for `host` nanoseconds."""
        return Time(self.now + duration, self.host + host)


@dataclass
class Host:
    """The launching thread: it runs ahead of the streams until it waits for one."""

    time: Time = field(default_factory=Time)
    module_calls: int = 0  # since it launched the last kernel

    @property
    def now(self) -> int:
        return self.time.now

    def work(self, duration: int) -> None:
        """Work for `duration` nanoseconds."""
        self.time = self.time.after(duration, duration)


@dataclass(frozen=True)
class Point:
    """A point on a stream's timeline."""

    host: Host
    time: Time

    def done(self) -> bool:
        """Whether the stream has reached it by the host's time."""
        return self.time.now <= self.host.now

    def wait(self) -> None:
        """Block the host until the stream has reached it."""
        self.host.time = max(self.host.time, self.time)


@dataclass
class Timeline:
    """The streams and engines of one card."""

    host: Host
    launch: int  # nanoseconds of host time for each kernel or copy
    _streams: dict[int, Time] = field(default_factory=dict)  # end of the submitted work, by stream
    _engines: dict[str, Time] = field(default_factory=dict)

    def run(
        self, stream: int, engine: str, duration: int, *, of_host: int = 0, taking: Mapping[str, int] | None = None
    ) -> tuple[int, int]:
        """Submit work of `duration` nanoseconds on `engine` to `stream`; return its begin and end.

        `of_host`: so many of them are the host's work, in a repeated call of both. `taking`: other engines of which it
        takes so many nanoseconds, after what they do already; it does not wait for these.
        """
        self.host.work(self.launch)
        begin = max(self.host.time, self._streams.get(stream, Time()), self._engines.get(engine, Time()))
        self._streams[stream] = self._engines[engine] = end = begin.after(duration, of_host)
        for other, taken in (taking or {}).items():
            self._engines[other] = max(begin, self._engines.get(other, Time())).after(taken)
        return begin.now, end.now

    def record(self, stream: int) -> Point:
        """Return the point after all work submitted to `stream` so far (an event recorded there)."""
        return Point(self.host, self._streams.get(stream, Time()))

    def wait(self, stream: int, point: Point) -> None:
        """Make work submitted to `stream` from now on begin after `point`."""
        self._streams[stream] = max(self._streams.get(stream, Time()), point.time)

    @property
    def end(self) -> Time:
        """When all streams have done their submitted work."""
        return max(self._streams.values(), default=Time())

    def synchronize(self) -> None:
        """Block the host until all streams are done."""
        self.host.time = max(self.host.time, self.end)
