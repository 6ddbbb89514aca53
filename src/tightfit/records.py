"""The nouns: Request and Footprint (footprint.py), Budget, Machine, Plan (its parts: decisions.py), Trace (trace.py).

All are frozen, validated once when made, equal by value, and go to JSON and YAML and back. No torch here.
What is illegal raises RequestError or PlanError with one line that says what would be legal.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from tightfit.decisions import (
    TECHNIQUES,
    Attention,
    ComponentPlan,
    ComponentRun,
    FeatureMaps,
    Granularity,
    OffloadTarget,
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
    BlockUse,
    Component,
    ComponentCall,
    Count,
    Footprint,
    KernelGroup,
    LayerWork,
    Phase,
    Positive,
    Rate,
    Real,
    Request,
    StripProfile,
    StripStageProfile,
    Variant,
    WeightBlock,
)
from tightfit.record import Record
from tightfit.trace import PhaseTrace, Sample, Trace
from tightfit.units import format_bytes

__all__ = [
    "TECHNIQUES",
    "Accelerator",
    "Attention",
    "BlockUse",
    "Budget",
    "CallMeasurement",
    "Component",
    "ComponentCall",
    "ComponentPlan",
    "ComponentRun",
    "FeatureMaps",
    "Footprint",
    "Granularity",
    "KernelGroup",
    "LayerWork",
    "Machine",
    "OffloadTarget",
    "Phase",
    "PhaseForecast",
    "PhaseMeasurement",
    "PhaseTrace",
    "Placement",
    "Plan",
    "Prediction",
    "Reason",
    "Request",
    "Sample",
    "Storage",
    "StripProfile",
    "StripStageProfile",
    "Trace",
    "VaePlan",
    "Variant",
    "WeightBlock",
    "check_techniques",
]


class Budget(Record):
    """Bytes that may be used: of the accelerator, or of each of several by name, and of RAM. At least one is set."""

    device: Size | None = None
    devices: dict[str, Size] = Field(default_factory=dict)  # instead of `device`
    ram: Size | None = None

    @model_validator(mode="after")
    def _set(self) -> Self:
        if self.device is None and self.ram is None and not self.devices:
            raise PlanError("a budget needs device bytes, RAM bytes or both, e.g. Budget(device='8GB')")
        if self.device is not None and self.devices:
            named = ", ".join(self.devices)
            raise PlanError(
                f"a budget of device={self.device} bytes says nothing of which: {named} are named beside it"
            )
        return self

    def of(self, name: str) -> int | None:
        """Bytes of the device `name`; None where it is not limited."""
        return self.devices.get(name) if self.devices else self.device

    @property
    def described(self) -> str:
        """Its bytes, in words."""
        said = [f"{format_bytes(size)} on {name}" for name, size in self.devices.items()]
        said += [format_bytes(self.device)] if self.device else []
        return " and ".join([*said, *([f"{format_bytes(self.ram)} of RAM"] if self.ram else [])])

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
    allocated: Count | None = None  # of a card: bytes that tensors of this process took when it was asked
    expandable_refused: str | None = None  # why those of its allocator cannot grow; None: they can
    product_name: str | None = None  # what it is sold as
    compute_capability: str | None = None  # of a CUDA card, e.g. "8.9"
    flash: bool = True  # whether torch has flash attention for it
    arithmetic_rates: dict[str, Rate] = Field(default_factory=dict)
    memory_rate: Rate | None = None  # bytes per second
    link_rate: Rate | None = None  # bytes per second, pinned host memory to device
    link_rate_out: Rate | None = None  # bytes per second, device to pinned host memory; None: as link_rate
    launch_overhead: Real = 0.0  # seconds of the host for each piece of work
    streamed_overhead: Real = (
        0.0  # seconds of the host to bring a layer that streams and use it once, beside the launch
    )
    resident_overhead: Real = 0.0  # the same for each use of one that is there
    channels_last_gains: dict[str, Rate] = Field(default_factory=dict)  # times as fast; by role.dtype of a component

    @property
    def is_cpu(self) -> bool:
        """Whether it is a computer's own processor: its memory is the host's."""
        return self.kind == "cpu"

    @property
    def display_name(self) -> str:
        """What a sentence calls it."""
        return "this CPU" if self.kind in ("cpu", "loopback") else f"the {self.product_name or self.name}"

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
    ram_used: Count | None = None  # bytes that it holds already
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
    expandable_segments: bool = False  # of the device's allocator: less of what it holds lies idle between tensors
    schedule: tuple[ComponentRun, ...] = ()  # who works after whom: who comes next may come early
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

    @property
    def devices(self) -> tuple[str, ...]:
        """On which components compute, the pipeline's own first."""
        others = (component.device for component in self.components.values() if component.device is not None)
        return tuple(dict.fromkeys((self.device, *others)))

    def device_of(self, name: str) -> str:
        """On which the component `name` computes."""
        component = self.components.get(name)
        return self.device if component is None or component.device is None else component.device

    def predicted_peak(self, name: str) -> int:
        """The most bytes that an allocator takes of the device `name`, as foreseen; 0 where nothing was."""
        own = name == self.device
        return max(
            (phase.peak_bytes if own else phase.other_devices.get(name, 0) for phase in self.forecast), default=0
        )

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
    """What would happen: a plan, and the trace of a call under it that was made on a pretend card."""

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
