"""Measurements of pipeline calls, and the prediction of one. Does not import torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from tightfit.schema.base import Count, Positive, Rate, Real, Record
from tightfit.schema.plan import Plan, Storage
from tightfit.schema.step_cache import CacheTrace
from tightfit.units import format_bytes

__all__ = [
    "CallMeasurement",
    "Moment",
    "PhaseMeasurement",
    "PhaseTrace",
    "PictureDifference",
    "Prediction",
    "Sample",
    "Trace",
]


class PictureDifference(NamedTuple):
    """How much a picture differs from its reference."""

    psnr: float  # dB; infinite for identical pictures
    ssim: float  # structural similarity; 1 for identical pictures


class Sample(Record):
    """Tensor bytes on the device at one moment, `seconds` after the start of the call."""

    seconds: Real
    weights: Count
    activations: Count


class Moment(NamedTuple):
    """An unvalidated Sample: there are thousands a second, and validating one takes longer."""

    seconds: float
    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


class PhaseTrace(Record):
    """Measurements of one phase of a call (encode, denoise, decode)."""

    name: str
    start: Real  # seconds after the start of the trace
    seconds: Real
    peak_bytes: Count  # peak of all tensors on the device
    peak_weights: Count = 0  # peak bytes of weights on the device
    peak_reserved: Count = 0  # peak bytes reserved by the device's allocator; 0 if the device has none
    other_devices: dict[str, Count] = Field(default_factory=dict)  # peak_bytes on the plan's other devices, by name
    bytes_in: Count = 0  # bytes copied from host to device
    bytes_out: Count = 0  # bytes copied from device to host
    runs: Positive = 1  # number of component calls
    on_demand: Count = 0  # number of weight groups that were loaded only when they were needed
    seconds_waiting: Real = 0.0  # seconds that the host waited for weights


class Trace(Record):
    """Measurements of one pipeline call, in seconds since it began, and bytes."""

    call: Positive = 1  # number of the call; 1 is the first
    device: str = "cpu"
    seconds: Real
    phases: tuple[PhaseTrace, ...]
    samples: tuple[Sample, ...] = ()
    other_bytes: Count = 0  # bytes allocated on the device, other than this pipeline's weights, when the call began
    rss_peak_bytes: Count = 0  # peak bytes of RAM that the process held; pages of files do not count
    caches: tuple[CacheTrace, ...] = ()  # of components with a step cache
    lossy: tuple[str, ...] = ()  # lossy techniques that were used in this call
    notes: tuple[str, ...] = ()  # unplanned events, as sentences

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of all tensors on the device over all phases."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def after(self, before: Trace) -> Trace:
        """Return one trace of `before` followed by this one; times of this one are shifted by `before.seconds`."""
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
    """Measurements of one phase of a call, with the prediction for the same plan from rates and shapes alone."""

    name: str
    runs: Positive  # number of component calls
    predicted_seconds: Real
    seconds: Real
    predicted_bytes: Count  # predicted peak, margin included
    peak_bytes: Count  # peak of all tensors on the device
    activations: Count  # peak_bytes less the peak of weights
    peak_reserved: Count = 0  # peak bytes reserved by the device's allocator, cached free blocks included
    time_scale: Rate | None = None  # measured / predicted time of arithmetic and launches; None: not measurable
    extra_bytes: Count = 0  # bytes that activations need beyond the prediction


class CallMeasurement(Record):
    """Measurements of one successful call under a budget's plan, without unplanned events."""

    plan: str  # digest of the plan's decisions
    first_call: bool = False  # first call of the pipeline in its process: its time includes one-time work
    stored: dict[str, Storage] = Field(default_factory=dict)  # storage by component, where it is not "as-loaded"
    phases: tuple[PhaseMeasurement, ...]


class Prediction(Record):
    """Predicted result of a call: a plan, and the trace of a call under that plan."""

    model: str
    card: str
    capacity: Positive  # bytes that the card has for tensors
    other_devices: dict[str, Positive] = Field(default_factory=dict)  # capacity of the other devices, by name
    needed_bytes: Count  # least capacity for the call; the allocator gives cached memory back where that helps
    fits: bool
    plan: Plan
    trace: Trace
    simulated: bool = False  # of a simulated call; else computed: peaks are upper bounds, and copies are not counted
    host_seconds: dict[str, Real] = Field(default_factory=dict)  # host's work on the critical path, by phase
    dtype: str | None = None  # dtype of most weights
    steps: Positive | None = None  # denoising steps, as asked or by default
    rates: Literal["nominal", "measured", "learned", "guessed"] = "nominal"  # source of the rates used for times
    would_fit: str | None = None  # what would fit, if this does not
    sent_bytes: Count = 0  # what each rank sends to the others, of several that share the rows

    @property
    def peak_reserved(self) -> int:
        """Peak bytes that the allocator reserves on a card that has room for all it keeps."""
        return max((phase.peak_reserved for phase in self.trace.phases), default=0)
