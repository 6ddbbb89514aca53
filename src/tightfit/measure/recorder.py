"""A running call → Trace: phases, bytes and time, sampled when they change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tightfit.devices.device import Device
from tightfit.devices.ram import held_bytes
from tightfit.measure.meter import TensorMeter
from tightfit.schema.results import Moment, PhaseTrace, Sample, Trace
from tightfit.units import format_bytes

__all__ = ["UNCOUNTED", "LiveNumbers", "Recorder"]

MAX_SAMPLES = 4096
FINEST = 0.0005  # minimum seconds between samples, doubled when there are too many
RSS_EVERY = 0.02  # seconds
UNCOUNTED = "activations were not counted (count_activations=False): peaks are of weights alone"


@dataclass(frozen=True)
class LiveNumbers:
    """Current state of a call, for progress displays; sizes in bytes."""

    phase: str
    seconds: float
    weights: int
    activations: int
    peak_bytes: int
    rss_bytes: int


@dataclass
class _RunningPhase:
    name: str
    start: float
    peak: int = 0
    peak_weights: int = 0
    peak_reserved: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    runs: int = 0
    on_demand: int = 0  # number of weight groups loaded on demand
    unforeseen: int = 0  # of these, how many were needed in an unexpected order
    read: int = 0  # of these, how many were read without a call of their modules
    waited: float = 0.0


_NOTHING = contextlib.nullcontext()


@dataclass
class Recorder:
    """Records weights as reported by the code that moves them, and activations by a meter or allocator; makes Traces.

    `weights` persists across calls (resident weights are kept); everything else is reset at each call.
    """

    device: Device
    count_activations: bool = True  # count them with a meter where no allocator does
    weights: int = 0
    _always: int = 0  # bytes of weights reported by `weights_changed`
    _held: dict[int, int] = field(default_factory=dict)  # bytes of weights reported by `hold`, by id of the holder
    _beside: int = 0  # bytes of other tensors on the device when the call began
    _calls: int = 0
    _running: bool = False
    _activations: int = 0
    _started: float = 0.0
    _phases: list[_RunningPhase] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)
    _latest: Moment | None = None  # a moment after the last sample, with fewer bytes
    _resolution: float = 0.0
    _rss: tuple[float, int, int] = (0.0, 0, 0)  # time, latest, peak
    _rss_since: int = 0  # peak since the last `highest_rss`
    _lossy: dict[str, None] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _ran_out: dict[str, tuple[int, int]] = field(default_factory=dict)
    _meter: TensorMeter | None = None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Record what happens inside the context as one call."""
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
        """Report that a component starts a call in `phase`."""
        if not self._running:
            return
        if not self._phases or self._phases[-1].name != phase:
            now = self.device.now() - self._started if self._phases else 0.0
            self.sample()
            self._end_phase()
            self.device.reset_peak()
            self._phases.append(_RunningPhase(phase, now))
        self._phases[-1].runs += 1
        self.sample()

    def _end_phase(self) -> None:
        """Read the allocator's peak of reserved bytes, only once per phase, because it is slow."""
        if self._phases:
            self._phases[-1].peak_reserved = self.device.peak_reserved_bytes()

    def leave(self) -> None:
        """Report that a component has finished one call."""
        if self._running:
            self.sample()

    def weights_changed(self, difference: int) -> None:
        """Report that `difference` bytes of weights were loaded onto the device (or removed, negative)."""
        self._always += difference
        self.weights = self._always + sum(self._held.values())
        if self._running:
            self.sample()

    def hold(self, who: object, size: int) -> None:
        """Report that `who` now has `size` bytes of weights on the device, replacing its previous value."""
        self._held[id(who)] = size
        self.weights_changed(0)

    def moved(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Report bytes copied between host and device."""
        if self._running and self._phases:
            self._phases[-1].bytes_in += bytes_in
            self._phases[-1].bytes_out += bytes_out

    def loaded_on_demand(self, *, learning: bool = False, read: bool = False) -> None:
        """Report that weights were loaded only when needed.

        `learning`: the order could not be known yet; `read`: they were read without a call of their modules.
        """
        if self._running and self._phases:
            self._phases[-1].on_demand += 1
            self._phases[-1].unforeseen += not (learning or read)
            self._phases[-1].read += read

    def waited(self, seconds: float) -> None:
        """Report seconds that the host waited for weights."""
        if self._running and self._phases:
            self._phases[-1].waited += seconds

    def ran_out(self, where: str, given_up: int) -> None:
        """Report an out-of-memory error: `given_up` bytes of weights were evicted, and the work was retried."""
        times, size = self._ran_out.get(where, (0, 0))
        self._ran_out[where] = times + 1, size + given_up

    def repeat(self, moments: Iterable[Moment]) -> None:
        """Add samples of work that is about to be repeated; `moments` are in seconds from now."""
        now = self.device.now() - self._started
        for moment in moments:
            self._add(moment._replace(seconds=now + moment.seconds))

    def lossy(self, what: str) -> None:
        """Report that a lossy technique was used in this call."""
        self._lossy[what] = None

    def note(self, what: str) -> None:
        """Report an event that the plan did not predict."""
        self._notes[what] = None

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Exclude tensors created inside (weights, host copies) from activations: the caller reports them itself."""
        return self._meter.paused() if self._meter else _NOTHING

    def _activations_changed(self, difference: int) -> None:
        self._activations += difference
        self._sample()

    def sample(self) -> None:
        """Take a sample."""
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
            rss = held_bytes()
            self._rss, self._rss_since = (now, rss, max(rss, self._rss[2])), max(rss, self._rss_since)

    def highest_rss(self) -> int:
        """Peak bytes of RAM that this process held, sampled since the last call of this method."""
        most, self._rss_since = max(self._rss_since, held_bytes()), 0
        return most

    def _add(self, moment: Moment) -> None:
        """Add a moment; within one resolution interval, the highest and the last are kept."""
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
        """Halve the number of samples, keeping the higher of each two."""
        pairs = zip(self._moments[::2], self._moments[1::2], strict=False)
        self._moments = [max(pair, key=lambda moment: moment.total) for pair in pairs]
        self._resolution *= 2

    def live(self) -> LiveNumbers:
        """Return the current numbers."""
        seconds = self.device.now() - self._started if self._running else 0.0
        phase = self._phases[-1].name if self._phases else ""
        peak = max((p.peak for p in self._phases), default=0)
        return LiveNumbers(phase, seconds, self.weights, self._activations, peak, self._rss[1])

    def trace(self) -> Trace:
        """Return the Trace of the call that has just ended."""
        self.device.synchronize()
        self.sample()
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
            rss_peak_bytes=max(self._rss[2], held_bytes()),
            lossy=tuple(self._lossy),
            notes=(*self._notes, *self._unplanned_events()),
        )

    def _unplanned_events(self) -> Iterator[str]:
        """Yield sentences about unplanned events."""
        for where, (times, size) in self._ran_out.items():
            yield f"{where}, {times} times: {format_bytes(size)} of resident weights are streamed from then on"
        for phase in self._phases:
            if phase.unforeseen:
                yield f"{phase.name}: {phase.unforeseen} layers were needed in an order that was not predicted"
            if phase.read:
                yield f"{phase.name}: {phase.read} layers were loaded because other modules read their weights"
