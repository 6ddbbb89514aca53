"""The nouns of what is known before a plan is made: what a pipeline is made of, and what it does for a request.

Activations are tensors on the device that are not weights, in bytes as the CUDA caching allocator hands them out.
Work does not depend on a machine: how long it takes is arithmetic by that machine's rates. No torch here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, Strict, model_validator

from tightfit.errors import InputError, RequestError
from tightfit.record import Record

__all__ = [
    "Component",
    "Count",
    "Footprint",
    "Pass",
    "Phase",
    "Positive",
    "Real",
    "Request",
    "Role",
    "Unit",
    "Use",
    "Workload",
]

Count = Annotated[int, Strict(), Field(ge=0)]  # strict: True is no number
Positive = Annotated[int, Strict(), Field(gt=0)]
Real = Annotated[float, Strict(), Field(ge=0)]
Role = Literal["encoder", "denoiser", "autoencoder", "other"]


class Request(Record):
    """What one call asks for. Fields left out take the pipeline's own defaults."""

    error: ClassVar[type[InputError]] = RequestError

    height: Positive | None = None  # pixels
    width: Positive | None = None
    frames: Positive | None = None
    batch: Positive = 1
    steps: Positive | None = None
    guidance: Real | None = None


class Unit(Record):
    """Weights that move together: a repeated block, or what is left outside the blocks."""

    name: str  # dotted path inside the component; "" for what is left
    bytes: Count
    dtypes: dict[str, Count] = Field(default_factory=dict)  # bytes by dtype
    matrices: dict[str, Count] = Field(default_factory=dict)  # of a leaf's, those of linear layers' matrices
    rows: Count = 0  # of these matrices


class Component(Record):
    """One network of a pipeline, under diffusers' own name."""

    name: str
    class_name: str
    role: Role
    bytes: Count
    dtypes: dict[str, Count] = Field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    leaves: tuple[Unit, ...] = ()  # single layers that own large parameters, the least that can move by itself
    skips: bool = False  # activations of early units wait for late ones (a U-Net)
    compiled: bool = False  # parts of it are compiled, which hooks keep out of
    convolves: bool = False  # most of what it convolves with are windows on pictures, not single points or clips
    head_widths: tuple[Positive, ...] = ()  # of its attention, as far as its parts say so

    @property
    def main_dtype(self) -> str | None:
        """Of most of its weights."""
        return max(self.dtypes, key=lambda dtype: self.dtypes[dtype], default=None)


class Workload(Record):
    """Kernels of one kind in one dtype, together."""

    kind: Literal["matmul", "convolution", "attention", "memory"]
    dtype: str
    operations: Count  # a multiplication and an addition are two
    traffic: Count  # bytes read and written on the device, weights too
    kernels: Positive


class Use(Record):
    """One turn of a unit while its component works; "" is what the component does between its units."""

    unit: str
    waiting: Count  # bytes of activations that are there when it begins
    peak: Count  # the most bytes of activations there are while it works, those included
    work: tuple[Workload, ...] = ()


class Pass(Record):
    """A component at work once, from its inputs to its outputs, and how often it does so in the same way."""

    component: str
    method: str  # "forward", "encode", "decode"; the path of a part that is called by itself
    runs: Positive = 1
    peak: Count  # bytes of activations
    uses: tuple[Use, ...]  # in their true order


class Phase(Record):
    """A stretch of the call in which components of the same role work."""

    name: str
    peak: Count  # bytes of activations, between passes too
    passes: tuple[Pass, ...]  # one of each kind
    order: tuple[Count, ...]  # which of them came when
    between: tuple[Workload, ...] = ()  # work outside all components: a scheduler's
    skipped: tuple[str, ...] = ()  # units, as component.unit, that none of its passes used
    conditional: tuple[str, ...] = ()  # units that some passes of their component used and others did not

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counted = [self.order.count(index) for index in range(len(self.passes))]
        if counted != [each.runs for each in self.passes]:
            raise ValueError(f"order names passes {counted} times, their runs say {[p.runs for p in self.passes]}")
        return self


class Footprint(Record):
    """What a pipeline is made of; with `phases`, what it does for `request`."""

    pipeline: str
    components: tuple[Component, ...]
    request: Request | None = None
    phases: tuple[Phase, ...] = ()

    @property
    def activation_peak(self) -> int:
        return max((phase.peak for phase in self.phases), default=0)
