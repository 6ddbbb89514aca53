"""The nouns: Request and Footprint (from footprint.py), Budget, Machine, Plan, Trace.

All are frozen, validated once when made, equal by value, and go to JSON and YAML and back. No torch here.
What is illegal raises RequestError or PlanError with one line that says what would be legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from tightfit.errors import PlanError, unknown_name
from tightfit.footprint import (
    Component,
    Count,
    Footprint,
    Pass,
    Phase,
    Positive,
    Real,
    Request,
    Unit,
    Use,
    Workload,
)
from tightfit.record import Record
from tightfit.units import format_bytes, parse_bytes

__all__ = [
    "TECHNIQUES",
    "Accelerator",
    "Budget",
    "Component",
    "ComponentPlan",
    "Footprint",
    "Grain",
    "Home",
    "Machine",
    "Pass",
    "Phase",
    "PhaseTrace",
    "Placement",
    "Plan",
    "Prediction",
    "Reason",
    "Request",
    "Sample",
    "Storage",
    "Trace",
    "Unit",
    "Use",
    "VaePlan",
    "Workload",
    "check_techniques",
]

Placement = Literal["resident", "per-phase", "per-unit"]
Home = Literal["host", "disk"]
Grain = Literal["block", "leaf"]
Storage = Literal["as-loaded", "float8_e4m3fn", "float8_e5m2", "int8"]
ComputeDtype = Literal["float32", "float16", "bfloat16"]


def _whole_bytes(size: object) -> object:
    """Words and whole floats (8e9) as the integer they stand for; anything else as it is, to be refused."""
    if isinstance(size, str):
        return parse_bytes(size)
    return int(size) if isinstance(size, float) and size.is_integer() else size


Size = Annotated[Positive, BeforeValidator(_whole_bytes)]
Rate = Annotated[float, Strict(), Field(gt=0)]  # per second

# the lossy techniques, by the names under which a user allows them
TECHNIQUES: Mapping[str, str] = {
    "fp8": "weights stored in eight bits, widened for each use",
    "int8": "matrices of linear layers stored as eight-bit integers, by torchao",
    "blended-tiling": "autoencoder tiles decoded on their own and blended where they overlap",
}


class Budget(Record):
    """Bytes that may be used: of each accelerator, and of RAM. At least one of the two is set."""

    device: Size | None = None
    ram: Size | None = None

    @model_validator(mode="after")
    def _set(self) -> Self:
        if self.device is None and self.ram is None:
            raise PlanError("a budget needs device bytes, RAM bytes or both, e.g. Budget(device='8GB')")
        return self


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

    @property
    def is_cpu(self) -> bool:
        """Whether it is a computer's own processor: its memory is the host's."""
        return self.kind == "cpu"

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
    ram_limit: Positive | None = None  # its control group's, where that is less than the computer has
    pinnable: Count | None = None  # bytes that could be page-locked for copies to a card
    cores: Positive  # that this process may use
    cpu: str | None = None  # what the processor is sold as
    disk_rate: Rate | None = None  # bytes per second, read past the page cache
    notes: tuple[str, ...] = ()  # what was not measured, and why


class Reason(Record):
    decision: str
    because: str


class VaePlan(Record):
    """How autoencoders work through their pictures, in both directions."""

    slicing: bool = False  # one item of a batch at a time
    tile: Annotated[int, Strict(), Field(ge=16)] | None = None  # side in pixels; None: whole pictures
    overlap: Annotated[float, Strict(), Field(ge=0, le=0.5)] = 0.25  # share of a tile shared with the next

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tile is None and "overlap" in self.model_fields_set and self.overlap != 0.25:
            raise PlanError(
                f"vae.overlap={self.overlap} needs a tile size too, e.g. vae.tile=512", overlap=self.overlap
            )
        return self


class ComponentPlan(Record):
    """Where one component's weights live and in what form.

    Of what is placed per unit, `stays` is brought once for as long as the component works, and the rest passes
    through a ring of `ring` bytes on the device, again for each use. Whoever gives `weights` alone leaves the two
    to the planner.
    """

    placement: Placement = "resident"
    home: Home = "host"  # where the masters are
    pinned: bool | None = None  # whether host memory is page-locked; None: where the system lets us
    weights: Size | None = None  # bytes on the device for its weights, ring included; None: as few as run well
    grain: Grain | None = None  # what moves together: a block's layers, or each layer by itself
    ring: Count | None = None  # bytes
    stays: tuple[str, ...] | None = None  # names of what moves together
    storage: Storage = "as-loaded"
    compute_dtype: ComputeDtype | None = None  # for stored weights; None: the dtype as loaded
    skip: tuple[str, ...] | None = None  # patterns of parameter names that stay as loaded; None: the default list
    channels_last: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.storage == "as-loaded":
            for field in ("skip", "compute_dtype"):
                if getattr(self, field) is not None:
                    raise PlanError(f"{field} needs storage=float8_e4m3fn, float8_e5m2 or int8", field=field)
        if self.placement != "per-unit":
            for field in ("weights", "grain", "ring", "stays"):
                if getattr(self, field) is not None:
                    raise PlanError(f"{field} only means something with placement=per-unit", field=field)
        return self

    @property
    def technique(self) -> str | None:
        """The lossy technique by which it is stored."""
        return None if self.storage == "as-loaded" else "int8" if self.storage == "int8" else "fp8"

    @property
    def described(self) -> str:
        """All that differs from the usual, on one line."""
        said = [self.placement] + (["from disk"] if self.home == "disk" else [])
        if self.ring is not None and self.stays is not None:
            said += [f"by {self.grain}", f"{len(self.stays)} stay", f"ring of {format_bytes(self.ring)}"]
        said += ["page-locked"] if self.pinned else []
        said += [] if self.storage == "as-loaded" else [f"stored as {self.storage}"]
        return ", ".join([*said, "channels-last"] if self.channels_last else said)


class Plan(Record):
    """Every decision about a run, and the reason for each."""

    device: str = "cpu"
    level: Annotated[int, Strict(), Field(ge=0, le=3)] | None = None
    request: Request | None = None
    budget: Budget | None = None
    components: dict[str, ComponentPlan] = Field(default_factory=dict)
    vae: VaePlan = VaePlan()
    offload_activations: bool = False  # activations that wait for a later unit wait in host memory
    reasons: tuple[Reason, ...] = ()

    @property
    def lossy(self) -> tuple[str, ...]:
        """What may change the picture, each named by its technique and where it applies."""
        named = [f"{c.technique}: {n} is stored in {c.storage}" for n, c in self.components.items() if c.technique]
        if self.vae.tile is not None and not self._one_tile():
            named.append(f"blended-tiling: pictures larger than {self.vae.tile} px are decoded in tiles")
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
        tiles = f"tiles of {self.vae.tile} px" if self.vae.tile else "whole pictures"
        lines.append(f"  autoencoder: {tiles}{', one item at a time' if self.vae.slicing else ''}")
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
    rss_peak_bytes: Count = 0
    lossy: tuple[str, ...] = ()  # techniques that really changed numbers in this call
    notes: tuple[str, ...] = ()  # what happened that nobody planned

    @property
    def peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def __str__(self) -> str:
        return f"call {self.call} on {self.device}: {self.seconds:.3g} s, peak {format_bytes(self.peak_bytes)}"


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


def check_techniques(names: Iterable[str]) -> tuple[str, ...]:
    """`names`, if all are lossy techniques; PlanError with the nearest name if one is not."""
    if isinstance(names, str):
        names = (names,)
    chosen = tuple(names)
    for name in chosen:
        if name not in TECHNIQUES:
            raise PlanError(unknown_name("technique", str(name), TECHNIQUES), name=str(name))
    return chosen
