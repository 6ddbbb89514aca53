"""The nouns: Request, Budget, Machine, Footprint, Plan, Trace.

All are frozen, validated once when made, equal by value, and go to JSON and YAML and back. No torch here.
What is illegal raises RequestError or PlanError with one line that says what would be legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tightfit.errors import InputError, PlanError, RequestError, unknown_name
from tightfit.record import Record
from tightfit.units import format_bytes, parse_bytes

__all__ = [
    "TECHNIQUES",
    "Accelerator",
    "Budget",
    "Component",
    "ComponentPlan",
    "Footprint",
    "Machine",
    "PhaseTrace",
    "Placement",
    "Plan",
    "Reason",
    "Request",
    "Sample",
    "Storage",
    "Trace",
    "Unit",
    "VaePlan",
    "check_techniques",
]

Placement = Literal["resident", "per-phase", "per-unit"]
Storage = Literal["as-loaded", "float8_e4m3fn", "float8_e5m2"]
ComputeDtype = Literal["float32", "float16", "bfloat16"]
Role = Literal["encoder", "denoiser", "autoencoder", "other"]
Bytes = Annotated[
    int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value), Field(ge=0)
]

# the lossy techniques, by the names under which a user allows them
TECHNIQUES: Mapping[str, str] = {
    "fp8": "weights stored in eight bits, widened for each use",
    "blended-tiling": "autoencoder tiles decoded on their own and blended where they overlap",
}


class Request(Record):
    """What one call asks for. Fields left out take the pipeline's own defaults."""

    error: ClassVar[type[InputError]] = RequestError

    height: int | None = Field(None, gt=0)  # pixels
    width: int | None = Field(None, gt=0)
    frames: int | None = Field(None, gt=0)
    batch: int = Field(1, gt=0)
    steps: int | None = Field(None, gt=0)
    guidance: float | None = Field(None, ge=0)


class Budget(Record):
    """Bytes that may be used: of each accelerator, and of RAM. At least one of the two is set."""

    device: Bytes | None = None
    ram: Bytes | None = None

    @model_validator(mode="after")
    def _set(self) -> Self:
        if not self.device and not self.ram:
            raise PlanError("a budget needs device bytes, RAM bytes or both, e.g. Budget(device='8GB')")
        return self


class Accelerator(Record):
    """A device that computes. Rates are None until they are measured."""

    name: str
    kind: str  # "cuda", "cpu", "loopback" …
    bytes: int = Field(gt=0)
    arithmetic_rates: dict[str, float] = Field(default_factory=dict)  # dtype → operations per second
    memory_rate: float | None = None  # bytes per second
    link_rate: float | None = None  # bytes per second, host to device


class Machine(Record):
    """What there is to run on."""

    accelerators: tuple[Accelerator, ...]
    ram: int = Field(gt=0)  # bytes that this process may use, cgroup limits included
    cores: int = Field(gt=0)
    disk_rate: float | None = None  # bytes per second


class Unit(Record):
    """Weights that move together: a repeated block, or what is left outside the blocks."""

    name: str  # dotted path inside the component; "" for what is left
    bytes: int = Field(ge=0)


class Component(Record):
    """One network of a pipeline, under diffusers' own name."""

    name: str
    class_name: str
    role: Role
    bytes: int = Field(ge=0)
    units: tuple[Unit, ...] = ()
    skips: bool = False  # activations of early units wait for late ones (a U-Net)


class Footprint(Record):
    """What a pipeline is made of."""

    pipeline: str
    components: tuple[Component, ...]


class Reason(Record):
    decision: str
    because: str


class VaePlan(Record):
    """How autoencoders work through their pictures, in both directions."""

    slicing: bool = False  # one item of a batch at a time
    tile: int | None = Field(None, ge=16)  # side in pixels; None: whole pictures
    overlap: float = Field(0.25, ge=0, le=0.5)  # share of a tile that it has in common with its neighbour

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tile is None and "overlap" in self.model_fields_set and self.overlap != 0.25:
            raise PlanError(
                f"vae.overlap={self.overlap} needs a tile size too, e.g. vae.tile=512", overlap=self.overlap
            )
        return self


class ComponentPlan(Record):
    """Where one component's weights live and in what form."""

    placement: Placement = "resident"
    storage: Storage = "as-loaded"
    compute_dtype: ComputeDtype | None = None  # for stored weights; None: the dtype as loaded
    skip: tuple[str, ...] | None = None  # patterns of parameter names that stay as loaded; None: the default list
    channels_last: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.storage == "as-loaded":
            for field in ("skip", "compute_dtype"):
                if getattr(self, field) is not None:
                    raise PlanError(
                        f"{field} only means something with storage=float8_e4m3fn or float8_e5m2", field=field
                    )
        return self


class Plan(Record):
    """Every decision about a run, and the reason for each."""

    device: str = "cpu"
    level: int | None = Field(None, ge=0, le=3)
    request: Request | None = None
    budget: Budget | None = None
    components: dict[str, ComponentPlan] = Field(default_factory=dict)
    vae: VaePlan = VaePlan()
    offload_activations: bool = False  # activations that wait for a later unit wait in host memory
    reasons: tuple[Reason, ...] = ()

    @property
    def lossy(self) -> tuple[str, ...]:
        """What may change the picture, each named by its technique and where it applies."""
        named = [f"fp8: {n} is stored in {c.storage}" for n, c in self.components.items() if c.storage != "as-loaded"]
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
            extra = [] if component.storage == "as-loaded" else [f"stored as {component.storage}"]
            extra += ["channels-last"] if component.channels_last else []
            lines.append(f"  {name}: {', '.join([component.placement, *extra])}")
        tiles = f"tiles of {self.vae.tile} px" if self.vae.tile else "whole pictures"
        lines.append(f"  autoencoder: {tiles}{', one item at a time' if self.vae.slicing else ''}")
        lines += ["  waiting activations: moved to host memory"] if self.offload_activations else []
        lines += [f"  lossy: {text}" for text in self.lossy] or ["  lossless"]
        lines += [f"  because: {reason.decision}: {reason.because}" for reason in self.reasons]
        return "\n".join(lines)


class Sample(Record):
    """Tensor bytes on the device at one moment, `seconds` after the start."""

    seconds: float = Field(ge=0)
    weights: int = Field(ge=0)
    activations: int = Field(ge=0)


class PhaseTrace(Record):
    """What was measured of one stretch in which the same component worked."""

    name: str
    start: float = Field(ge=0)  # seconds after the start of the trace
    seconds: float = Field(ge=0)
    peak_bytes: int = Field(ge=0)  # of tensors on the device
    peak_weights: int = Field(0, ge=0)
    bytes_in: int = Field(0, ge=0)  # host to device
    bytes_out: int = Field(0, ge=0)
    runs: int = Field(1, gt=0)  # how many forward passes


class Trace(Record):
    """What was measured of one call."""

    call: int = Field(1, gt=0)
    device: str = "cpu"
    seconds: float = Field(ge=0)
    phases: tuple[PhaseTrace, ...]
    samples: tuple[Sample, ...] = ()
    rss_peak_bytes: int = Field(0, ge=0)
    lossy: tuple[str, ...] = ()  # techniques that really changed numbers in this call
    notes: tuple[str, ...] = ()  # what happened that nobody planned

    @property
    def peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def __str__(self) -> str:
        return f"call {self.call} on {self.device}: {self.seconds:.3g} s, peak {format_bytes(self.peak_bytes)}"


def check_techniques(names: Iterable[str]) -> tuple[str, ...]:
    """`names`, if all are lossy techniques; PlanError with the nearest name if one is not."""
    if isinstance(names, str):
        names = (names,)
    chosen = tuple(names)
    for name in chosen:
        if name not in TECHNIQUES:
            raise PlanError(unknown_name("technique", str(name), TECHNIQUES), name=str(name))
    return chosen
