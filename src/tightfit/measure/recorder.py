"""A running call → Trace: phases, bytes and time, sampled as they change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from tightfit.devices.device import Device
from tightfit.measure.meter import TensorMeter
from tightfit.schema.results import PhaseTrace, Sample, Trace
from tightfit.units import format_bytes

__all__ = ["UNCOUNTED", "LiveNumbers", "Moment", "Recorder"]

MAX_SAMPLES = 4096
FINEST = 0.0005  # seconds between samples, until there are too many
RSS_EVERY = 0.02  # seconds
UNCOUNTED = "activations were not counted (count_activations=False): peaks are of weights alone"


@dataclass(frozen=True)
class LiveNumbers:
    """What is going on right now, for people who watch."""

    phase: str
    seconds: float
    weights: int
    activations: int
    peak_bytes: int
    rss_bytes: int


class Moment(NamedTuple):
    """A Sample before anybody asks for it: there are thousands a second, and validating one takes longer."""

    seconds: float
    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


@dataclass
class _Phase:
    name: str
    start: float
    peak: int = 0
    peak_weights: int = 0
    peak_reserved: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    runs: int = 0
    on_demand: int = 0  # groups of weights
    unforeseen: int = 0  # of these, how many came in an order that was thought to be known
    waited: float = 0.0


_NOTHING = contextlib.nullcontext()


@dataclass
class Recorder:
    """Told of weights by those who move them and of activations by a meter or the allocator; makes Traces.

    `weights` outlives a call (what is resident stays); everything else starts anew with each.
    """

    device: Device
    count_activations: bool = True  # where no allocator counts them
    weights: int = 0
    _always: int = 0  # of the weights, those that nobody holds for a while only
    _held: dict[int, int] = field(default_factory=dict)  # bytes by who holds them
    _beside: int = 0  # bytes of the device that others had when the call began
    _calls: int = 0
    _running: bool = False
    _activations: int = 0
    _started: float = 0.0
    _phases: list[_Phase] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)
    _latest: Moment | None = None  # newer than the last sample, and lower
    _resolution: float = 0.0
    _rss: tuple[float, int, int] = (0.0, 0, 0)  # when, last, peak
    _rss_since: int = 0  # peak since somebody asked
    _lossy: dict[str, None] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _ran_out: dict[str, tuple[int, int]] = field(default_factory=dict)
    _meter: TensorMeter | None = None
    _process: psutil.Process = field(default_factory=psutil.Process)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Measures what happens inside, as one call."""
        self._begin()
        try:
            with self._meter or contextlib.nullcontext():
                yield
        finally:
            self._running = False
            if self._meter:
                self._meter.forget()
                self._meter = None

    def _begin(self) -> None:
        self._calls += 1
        self._activations, self._started = 0, self.device.now()
        self._phases, self._moments, self._latest, self._resolution = [], [], None, FINEST
        self._rss = (0.0, 0, 0)
        self._lossy.clear()
        self._notes.clear()
        self._ran_out.clear()
        allocated = self.device.allocated_bytes()
        self._beside = max((allocated or 0) - self.weights, 0)
        if allocated is None:
            if self.count_activations:
                self._meter = TensorMeter(self._activations_changed)
            else:
                self.note(UNCOUNTED)
        self.device.reset_peak()
        self._running = True

    @property
    def running(self) -> bool:
        return self._running

    def enter(self, phase: str) -> None:
        """A component starts to work in `phase`."""
        if not self._running:
            return
        if not self._phases or self._phases[-1].name != phase:
            now = self.device.now() - self._started if self._phases else 0.0
            self.look()
            self._end_phase()
            self.device.reset_peak()
            self._phases.append(_Phase(phase, now))
        self._phases[-1].runs += 1
        self.look()

    def _end_phase(self) -> None:
        """Asks the allocator what it held, once: the question is a slow one."""
        if self._phases:
            self._phases[-1].peak_reserved = self.device.peak_reserved_bytes()

    def leave(self) -> None:
        """A component has finished one pass."""
        if self._running:
            self.look()

    def weights_changed(self, difference: int) -> None:
        """`difference` bytes of weights came onto the device (or left it, negative)."""
        self._always += difference
        self.weights = self._always + sum(self._held.values())
        if self._running:
            self.look()

    def hold(self, who: object, size: int) -> None:
        """`who` has `size` bytes of weights on the device now, whatever it had before."""
        self._held[id(who)] = size
        self.weights_changed(0)

    def moved(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Bytes that crossed between host and device."""
        if self._running and self._phases:
            self._phases[-1].bytes_in += bytes_in
            self._phases[-1].bytes_out += bytes_out

    def unforeseen(self, *, learning: bool = False) -> None:
        """Weights come only now that they are needed; `learning`: nobody could know the order yet."""
        if self._running and self._phases:
            self._phases[-1].on_demand += 1
            self._phases[-1].unforeseen += not learning

    def waited(self, seconds: float) -> None:
        """The host waited for weights."""
        if self._running and self._phases:
            self._phases[-1].waited += seconds

    def ran_out(self, where: str, given_up: int) -> None:
        """Out of memory; `given_up` bytes of weights made room, and the work was done again."""
        times, size = self._ran_out.get(where, (0, 0))
        self._ran_out[where] = times + 1, size + given_up

    def repeat(self, moments: Iterable[Moment]) -> None:
        """Takes samples of what is about to happen in the same way as before, in seconds from now."""
        now = self.device.now() - self._started
        for moment in moments:
            self._add(moment._replace(seconds=now + moment.seconds))

    def lossy(self, what: str) -> None:
        """A technique changed numbers in this call."""
        self._lossy[what] = None

    def note(self, what: str) -> None:
        """Something happened that the plan did not foresee."""
        self._notes[what] = None

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """What is made inside is no activation (weights, host copies): whoever makes it tells by itself."""
        return self._meter.paused() if self._meter else _NOTHING

    def _activations_changed(self, difference: int) -> None:
        self._activations += difference
        self._sample()

    def look(self) -> None:
        """Takes a sample."""
        allocated = self.device.allocated_bytes()
        if allocated is not None:
            self._activations = max(allocated - self.weights, 0)
        elif self._meter:
            self._meter.settle()
        self._sample()

    def _sample(self) -> None:
        now, total = self.device.now() - self._started, self.weights + self._activations
        if self._phases:
            phase = self._phases[-1]
            phase.peak = max(phase.peak, total, self.device.peak_bytes() or 0)
            phase.peak_weights = max(phase.peak_weights, self.weights)
        self._add(Moment(now, self.weights, max(self._activations, 0)))
        if now - self._rss[0] > RSS_EVERY:
            rss = int(self._process.memory_info().rss)
            self._rss, self._rss_since = (now, rss, max(rss, self._rss[2])), max(rss, self._rss_since)

    def highest_rss(self) -> int:
        """The most bytes of RAM that the process was seen to hold since this was asked last."""
        most, self._rss_since = max(self._rss_since, int(self._process.memory_info().rss)), 0
        return most

    def _add(self, moment: Moment) -> None:
        """Of what happens within one resolution, the highest and the last are kept."""
        last = self._moments[-1] if self._moments else None
        if last is not None and moment.seconds - last.seconds < self._resolution:
            if moment.total > last.total:
                self._moments[-1] = moment._replace(seconds=last.seconds)
                self._latest = None
            else:
                self._latest = moment
            return
        if self._latest is not None:
            self._moments.append(self._latest)
            self._latest = None
        self._moments.append(moment)
        if len(self._moments) > MAX_SAMPLES:
            self._thin()

    def _thin(self) -> None:
        """Halves the samples, keeping the higher of each two."""
        pairs = zip(self._moments[::2], self._moments[1::2], strict=False)
        self._moments = [max(pair, key=lambda moment: moment.total) for pair in pairs]
        self._resolution *= 2

    def live(self) -> LiveNumbers:
        """The numbers of this moment."""
        seconds = self.device.now() - self._started if self._running else 0.0
        phase = self._phases[-1].name if self._phases else ""
        peak = max((p.peak for p in self._phases), default=0)
        return LiveNumbers(phase, seconds, self.weights, self._activations, peak, self._rss[1])

    def trace(self) -> Trace:
        """The call that has just ended."""
        self.device.synchronize()
        self.look()
        self._end_phase()
        seconds = self.device.now() - self._started
        ends = [phase.start for phase in self._phases[1:]] + [seconds] * bool(self._phases)
        phases = tuple(
            PhaseTrace(
                name=p.name,
                start=p.start,
                seconds=end - p.start,
                peak_bytes=p.peak,
                peak_weights=p.peak_weights,
                peak_reserved=p.peak_reserved,
                bytes_in=p.bytes_in,
                bytes_out=p.bytes_out,
                runs=max(p.runs, 1),
                on_demand=p.on_demand,
                seconds_waiting=p.waited,
            )
            for p, end in zip(self._phases, ends, strict=True)
        )
        moments = [*self._moments, *([self._latest] if self._latest else [])]
        return Trace(
            call=self._calls,
            device=self.device.name,
            seconds=seconds,
            phases=phases,
            samples=tuple(Sample(**moment._asdict()) for moment in moments),
            other_bytes=self._beside,
            rss_peak_bytes=max(self._rss[2], int(self._process.memory_info().rss)),
            lossy=tuple(self._lossy),
            notes=(*self._notes, *self._told()),
        )

    def _told(self) -> Iterator[str]:
        """What happened that nobody planned, in sentences."""
        for where, (times, size) in self._ran_out.items():
            yield f"{where}, {times} times: {format_bytes(size)} of weights that stayed pass through from then on"
        for phase in self._phases:
            if phase.unforeseen:
                yield f"{phase.name}: {phase.unforeseen} layers were needed in an order that was not foreseen"
