"""What was measured of calls, or predicted of one. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tightfit.schema.base import Count, Positive, Rate, Real, Record
from tightfit.schema.plan import Plan, Storage
from tightfit.units import format_bytes

__all__ = ["CallMeasurement", "PhaseMeasurement", "PhaseTrace", "Prediction", "Sample", "Trace"]


class Sample(Record):
    """Tensor bytes on the device at one moment, `seconds` after the start."""

    seconds: Real
    weights: Count
    activations: Count


class PhaseTrace(Record):
    """What was measured of one stretch in which the same component worked."""

    name: str
    start: Real  # seconds after the start of the trace
    seconds: Real
    peak_bytes: Count  # of tensors on the device
    peak_weights: Count = 0
    peak_reserved: Count = 0  # what the device's allocator held for them; 0 where there is none
    other_devices: dict[str, Count] = Field(
        default_factory=dict
    )  # peaks of tensors on the plan's other devices, by name
    bytes_in: Count = 0  # host to device
    bytes_out: Count = 0
    runs: Positive = 1  # how many forward passes
    on_demand: Count = 0  # weights that came only when they were needed
    seconds_waiting: Real = 0.0  # seconds that the host waited for weights


class Trace(Record):
    """What was measured of one call."""

    call: Positive = 1
    device: str = "cpu"
    seconds: Real
    phases: tuple[PhaseTrace, ...]
    samples: tuple[Sample, ...] = ()
    other_bytes: Count = 0  # bytes of the device that others than its weights had when it began
    rss_peak_bytes: Count = 0
    lossy: tuple[str, ...] = ()  # techniques that really changed numbers in this call
    notes: tuple[str, ...] = ()  # what happened that nobody planned

    @property
    def peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def after(self, before: Trace) -> Trace:
        """`before`, and then this, as one call."""
        late = before.seconds
        phases = [phase.model_copy(update={"start": phase.start + late}) for phase in self.phases]
        samples = [sample.model_copy(update={"seconds": sample.seconds + late}) for sample in self.samples]
        return self.model_copy(
            update={
                "seconds": self.seconds + late,
                "phases": (*before.phases, *phases),
                "samples": (*before.samples, *samples),
                "other_bytes": before.other_bytes,
                "rss_peak_bytes": max(before.rss_peak_bytes, self.rss_peak_bytes),
                "lossy": tuple(dict.fromkeys((*before.lossy, *self.lossy))),
                "notes": tuple(dict.fromkeys((*before.notes, *self.notes))),
            }
        )

    def __str__(self) -> str:
        return f"call {self.call} on {self.device}: {self.seconds:.3g} s, peak {format_bytes(self.peak_bytes)}"


class PhaseMeasurement(Record):
    """What one call showed of a phase, beside what plain rates and shapes had foreseen for it under the same plan."""

    name: str
    runs: Positive  # how many forward passes
    predicted_seconds: Real
    seconds: Real
    predicted_bytes: Count  # with the margin
    peak_bytes: Count  # of tensors on the device
    activations: Count  # of these, what was there beyond weights
    peak_reserved: Count = 0  # what the device's allocator held; it keeps some that nobody needs
    time_scale: Rate | None = (
        None  # how many times as long its arithmetic takes as rates say; None: that cannot be told
    )
    extra_bytes: Count = 0  # bytes more that its activations want


class CallMeasurement(Record):
    """What one call under a budget's plan was like: one that ended well, and in which nothing happened unplanned."""

    plan: str  # a digest of what it decided
    first_call: bool = False  # of its pipeline in its process: some of its time was for what is done once
    stored: dict[str, Storage] = Field(default_factory=dict)  # components whose weights were not as loaded
    phases: tuple[PhaseMeasurement, ...]


class Prediction(Record):
    """What would happen: a plan, and the trace of a call under it that was made on a simulated card."""

    model: str
    card: str
    capacity: Positive  # bytes that the card has for tensors
    other_devices: dict[str, Positive] = Field(default_factory=dict)  # and others on which components compute, by name
    fits: bool
    plan: Plan
    trace: Trace
    dtype: str | None = None  # of most weights
    rates: Literal["nominal", "measured", "learned", "guessed"] = "nominal"  # what its times are made from
    would_fit: str | None = None  # what would fit, where it does not

    @property
    def peak_reserved(self) -> int:
        return max((phase.peak_reserved for phase in self.trace.phases), default=0)
