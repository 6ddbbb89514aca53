"""The nouns: Request and Footprint (from footprint.py), Budget, Machine, Plan (its parts from decisions.py), Trace.

All are frozen, validated once when made, equal by value, and go to JSON and YAML and back. No torch here.
What is illegal raises RequestError or PlanError with one line that says what would be legal.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from tightfit.decisions import (
    TECHNIQUES,
    Attention,
    ComponentPlan,
    Grain,
    Home,
    Maps,
    PhaseForecast,
    Placement,
    Reason,
    Size,
    Storage,
    VaePlan,
    check_techniques,
)
from tightfit.errors import PlanError
from tightfit.footprint import (
    Component,
    Count,
    Footprint,
    Pass,
    Phase,
    Positive,
    Rate,
    Real,
    Request,
    Turn,
    Unit,
    Use,
    Variant,
    Way,
    Workload,
)
from tightfit.record import Record
from tightfit.units import format_bytes

__all__ = [
    "TECHNIQUES",
    "Accelerator",
    "Attention",
    "Budget",
    "Component",
    "ComponentPlan",
    "Experience",
    "Footprint",
    "Grain",
    "Home",
    "Machine",
    "Maps",
    "Pass",
    "Phase",
    "PhaseExperience",
    "PhaseForecast",
    "PhaseTrace",
    "Placement",
    "Plan",
    "Prediction",
    "Reason",
    "Request",
    "Sample",
    "Storage",
    "Trace",
    "Turn",
    "Unit",
    "Use",
    "VaePlan",
    "Variant",
    "Way",
    "Workload",
    "check_techniques",
]


class Budget(Record):
    """Bytes that may be used: of each accelerator, and of RAM. At least one of the two is set."""

    device: Size | None = None
    ram: Size | None = None

    @model_validator(mode="after")
    def _set(self) -> Self:
        if self.device is None and self.ram is None:
            raise PlanError("a budget needs device bytes, RAM bytes or both, e.g. Budget(device='8GB')")
        return self

    @property
    def of_cpu(self) -> int:
        """Bytes, where the two are the same memory."""
        return min(size for size in (self.device, self.ram) if size is not None)


class Accelerator(Record):
    """A device that computes. Rates are None until they are measured.

    Arithmetic rates are operations per second (a multiplication and an addition are two) by dtype ("bfloat16"), or
    by kind and dtype ("convolution.bfloat16") where a kind has a rate of its own: matmul, convolution, attention.
    """

    name: str
    kind: str  # "cuda", "cpu", "loopback", "pretend" …
    bytes: Positive
    free: Count | None = None  # of these bytes, how many tensors could take when it was asked
    title: str | None = None  # what it is sold as
    compute_capability: str | None = None  # of a CUDA card, e.g. "8.9"
    arithmetic_rates: dict[str, Rate] = Field(default_factory=dict)
    memory_rate: Rate | None = None  # bytes per second
    link_rate: Rate | None = None  # bytes per second, pinned host memory to device
    link_rate_out: Rate | None = None  # bytes per second, device to pinned host memory; None: as link_rate
    launch_overhead: Real = 0.0  # seconds of the host for each piece of work
    channels_last_gains: dict[str, Rate] = Field(default_factory=dict)  # times as fast; by role.dtype of a component

    @property
    def is_cpu(self) -> bool:
        """Whether it is a computer's own processor: its memory is the host's."""
        return self.kind == "cpu"

    @property
    def called(self) -> str:
        """What a sentence calls it."""
        return "this CPU" if self.kind in ("cpu", "loopback") else f"the {self.title or self.name}"

    def arithmetic_rate(self, kind: str, dtype: str) -> float | None:
        """Operations per second for `kind` in `dtype`; float32's where the dtype has none."""
        for key in (f"{kind}.{dtype}", dtype, f"{kind}.float32", "float32"):
            if key in self.arithmetic_rates:
                return self.arithmetic_rates[key]
        return None


class Machine(Record):
    """What there is to run on. What is free is what was free when it was asked."""

    accelerators: tuple[Accelerator, ...]
    ram: Positive  # bytes that this process may use, cgroup limits included
    ram_free: Count | None = None  # bytes that it could still take
    ram_taken: Count | None = None  # bytes that it holds already
    ram_limit: Positive | None = None  # its control group's, where that is less than the computer has
    pinnable: Count | None = None  # bytes that could be page-locked for copies to a card
    cores: Positive  # that this process may use
    cpu: str | None = None  # what the processor is sold as
    disk_rate: Rate | None = None  # bytes per second, read past the page cache
    notes: tuple[str, ...] = ()  # what was not measured, and why


class Plan(Record):
    """Every decision about a run, and the reason for each."""

    device: str = "cpu"
    level: Annotated[int, Strict(), Field(ge=0, le=3)] | None = None
    request: Request | None = None
    budget: Budget | None = None
    components: dict[str, ComponentPlan] = Field(default_factory=dict)
    vae: VaePlan = VaePlan()
    offload_activations: bool = False  # activations that wait for a later unit wait in host memory
    growing_segments: bool = False  # of the device's allocator: less of what it holds lies idle between tensors
    reasons: tuple[Reason, ...] = ()
    forecast: tuple[PhaseForecast, ...] = ()  # of the first call

    @property
    def lossy(self) -> tuple[str, ...]:
        """What may change the picture, each named by its technique and where it applies."""
        named = [what for name, component in self.components.items() for what in component.lossy(name)]
        if self.vae.tile is not None and not self._one_tile():
            where = "" if self.vae.strips is None else ", where they cannot be in strips"
            named.append(f"blended-tiling: pictures larger than {self.vae.tile} px are decoded in tiles{where}")
        return tuple(named)

    @property
    def lossless(self) -> bool:
        return not self.lossy

    def _one_tile(self) -> bool:
        sides = (self.request.height, self.request.width) if self.request else (None, None)
        return all(side is not None and self.vae.tile is not None and side <= self.vae.tile for side in sides)

    def __str__(self) -> str:
        lines = [f"plan: {'level ' + str(self.level) if self.level is not None else 'custom'} on {self.device}"]
        for name, component in self.components.items():
            lines.append(f"  {name}: {component.described}")
        lines.append(f"  autoencoder: {self.vae.described}")
        lines += ["  waiting activations: moved to host memory"] if self.offload_activations else []
        lines += [f"  lossy: {text}" for text in self.lossy] or ["  lossless"]
        lines += [f"  because: {reason.decision}: {reason.because}" for reason in self.reasons]
        return "\n".join(lines)


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
    bytes_in: Count = 0  # host to device
    bytes_out: Count = 0
    runs: Positive = 1  # how many forward passes
    on_demand: Count = 0  # weights that came only when they were needed
    waited: Real = 0.0  # seconds that the host waited for weights


class Trace(Record):
    """What was measured of one call."""

    call: Positive = 1
    device: str = "cpu"
    seconds: Real
    phases: tuple[PhaseTrace, ...]
    samples: tuple[Sample, ...] = ()
    beside: Count = 0  # bytes of the device that others than its weights had when it began
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
                "beside": before.beside,
                "rss_peak_bytes": max(before.rss_peak_bytes, self.rss_peak_bytes),
                "lossy": tuple(dict.fromkeys((*before.lossy, *self.lossy))),
                "notes": tuple(dict.fromkeys((*before.notes, *self.notes))),
            }
        )

    def __str__(self) -> str:
        return f"call {self.call} on {self.device}: {self.seconds:.3g} s, peak {format_bytes(self.peak_bytes)}"


class PhaseExperience(Record):
    """What one call showed of a phase, beside what plain rates and shapes had foreseen for it under the same plan."""

    name: str
    runs: Positive  # how many forward passes
    foreseen_seconds: Real
    seconds: Real
    foreseen_bytes: Count  # with the margin
    peak_bytes: Count  # of tensors on the device
    activations: Count  # of these, what was there beyond weights
    peak_reserved: Count = 0  # what the device's allocator held; it keeps some that nobody needs
    pace: Rate | None = None  # how many times as long its arithmetic takes as rates say; None: that cannot be told
    more: Count = 0  # bytes more that its activations want


class Experience(Record):
    """What one call under a budget's plan was like: one that ended well, and in which nothing happened unplanned."""

    plan: str  # a digest of what it decided
    first: bool = False  # of its pipeline in its process: some of its time was for what is done once
    stored: dict[str, Storage] = Field(default_factory=dict)  # components whose weights were not as loaded
    phases: tuple[PhaseExperience, ...]


class Prediction(Record):
    """What would happen: a plan, and the trace of a call under it that was made on a pretend card."""

    model: str
    card: str
    capacity: Positive  # bytes that the card has for tensors
    fits: bool
    plan: Plan
    trace: Trace

    @property
    def peak_reserved(self) -> int:
        return max((phase.peak_reserved for phase in self.trace.phases), default=0)
