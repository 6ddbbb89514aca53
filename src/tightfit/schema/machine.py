"""What there is to run on, and how much of it may be used. No torch here."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tightfit.errors import PlanError
from tightfit.schema.base import Count, Positive, Rate, Real, Record, Size
from tightfit.units import format_bytes

__all__ = ["Accelerator", "Budget", "Machine"]


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
    kind: str  # "cuda", "cpu", "loopback", "simulated" …
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
