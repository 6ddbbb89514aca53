"""Simulated time in whole nanoseconds: a host that launches, streams that work in order, engines that are shared.

A kernel starts when the host has launched it, its stream has done what came before and its engine is free. Copies
have an engine of their own for each direction, so a copy on one stream and arithmetic on another overlap as they
would on a card.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Host", "Point", "Timeline"]


@dataclass
class Host:
    """The thread that launches: it is ahead of the streams until it waits for one."""

    now: int = 0


@dataclass(frozen=True)
class Point:
    """A point on a stream's timeline."""

    host: Host
    time: int

    def done(self) -> bool:
        """Whether the stream has passed it by now."""
        return self.time <= self.host.now

    def wait(self) -> None:
        """Lets the host wait until it has."""
        self.host.now = max(self.host.now, self.time)


@dataclass
class Timeline:
    """The streams and engines of one card."""

    host: Host
    launch: int  # nanoseconds of the host for each piece of work
    _streams: dict[int, int] = field(default_factory=dict)  # when each has done all it was given
    _engines: dict[str, int] = field(default_factory=dict)

    def run(self, stream: int, engine: str, duration: int) -> tuple[int, int]:
        """Gives `stream` work of `duration` nanoseconds on `engine`; returns when it begins and ends."""
        self.host.now += self.launch
        begin = max(self.host.now, self._streams.get(stream, 0), self._engines.get(engine, 0))
        self._streams[stream] = self._engines[engine] = end = begin + duration
        return begin, end

    def record(self, stream: int) -> Point:
        """The point at the end of what `stream` was given so far (an event recorded there)."""
        return Point(self.host, self._streams.get(stream, 0))

    def wait(self, stream: int, point: Point) -> None:
        """What `stream` is given from now on begins after `point`."""
        self._streams[stream] = max(self._streams.get(stream, 0), point.time)

    @property
    def end(self) -> int:
        """When all streams have done what they were given."""
        return max(self._streams.values(), default=0)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.host.now = max(self.host.now, self.end)
