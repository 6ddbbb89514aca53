"""What was measured of one call: parts of a Report."""

from __future__ import annotations

from pydantic import Field

from tightfit.footprint import Count, Positive, Real
from tightfit.record import Record
from tightfit.units import format_bytes

__all__ = ["PhaseTrace", "Sample", "Trace"]


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
