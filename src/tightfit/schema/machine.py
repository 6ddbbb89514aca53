"""Hardware to run on, the kernels that its rates are for, and budgets that limit its memory. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tightfit.errors import InputError, PlanError
from tightfit.schema.attention import CUDNN_FIRST
from tightfit.schema.base import Count, Positive, Rate, Real, Record, Size
from tightfit.units import format_bytes

__all__ = [
    "EXCHANGES",
    "GROUP_SPARE",
    "Accelerator",
    "Amounts",
    "Attending",
    "Budget",
    "KernelGroup",
    "KernelKind",
    "LayerWork",
    "Machine",
]

Exchange = Literal["exchange", "network", "ring", "network-ring"]
# "efficient-attention": torch's memory-efficient kernel, where flash attention cannot run.
# "cudnn-first-attention": the same where the card is not known, if cuDNN would take the call: where torch tries cuDNN
# first, that is "attention"
Attending = Literal["attention", "efficient-attention", "cudnn-first-attention"]
Computing = Literal["matmul", "convolution", "memory", "normalization"] | Attending
KernelKind = Computing | Exchange
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

# bytes of a control group that plans leave, and from which on resident weights are evicted: that takes time, while
# another process may take more
GROUP_SPARE = 32 * 2**20


class Budget(Record):
    """Limits in bytes: of one device, or of each of several devices by name, and of RAM. At least one is set.

    Raises PlanError if none is set, or if both `device` and `devices` are.
    """

    device: Size | None = None  # bytes of the one device
    devices: dict[str, Size] = Field(default_factory=dict)  # bytes by device name, instead of `device`
    ram: Size | None = None  # bytes of host memory

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
        """Return the limit in bytes of the device `name`; None if it is not limited."""
        return self.devices.get(name) if self.devices else self.device

    @property
    def described(self) -> str:
        """The limits as text, e.g. "8 GiB and 16 GiB of RAM"."""
        said = [f"{format_bytes(size)} on {name}" for name, size in self.devices.items()]
        said += [format_bytes(self.device)] if self.device else []
        return " and ".join([*said, *([f"{format_bytes(self.ram)} of RAM"] if self.ram else [])])

    @property
    def of_cpu(self) -> int:
        """Limit in bytes on a CPU, whose device memory and RAM are the same memory."""
        return min(size for size in (self.device, self.ram) if size is not None)


class Accelerator(Record):
    """A device that computes. Rates are None until they are measured.

    Arithmetic rates are operations per second (a multiply-add counts as two), keyed by dtype ("bfloat16"), or by
    kind and dtype ("convolution.bfloat16") if a kind has its own rate: matmul, convolution, attention. Those from
    `multiprocessors` to `kernel_latency` refine the time of a kernel, see `kernel_time`.
    """

    name: str
    kind: str  # "cuda", "cpu", "loopback", "simulated" …
    bytes: Positive  # total memory
    free: Count | None = None  # bytes available to tensors when it was queried
    allocated: Count | None = None  # bytes allocated by tensors of this process when it was queried; cards only
    expandable_refused: str | None = None  # why its allocator's segments cannot be expandable; None: they can
    product_name: str | None = None  # commercial name
    compute_capability: str | None = None  # of a CUDA card, e.g. "8.9"
    flash: bool = True  # whether torch has flash attention for it
    arithmetic_rates: dict[str, Rate] = Field(default_factory=dict)
    memory_rate: Rate | None = None  # bytes per second
    multiprocessors: Positive | None = None
    clock: Rate | None = None  # hertz, of the multiprocessors
    tail: Real = 0.0  # of the time in which each multiprocessor computes one tile: how much longer a product takes
    cache_bytes: Positive | None = None  # of the second-level cache, that of all multiprocessors
    cache_rate: Rate | None = None  # bytes per second, of that cache
    kernel_latency: Real = 0.0  # device seconds in which a kernel starts and ends
    link_rate: Rate | None = None  # bytes per second, pinned host memory to device
    link_rate_out: Rate | None = None  # bytes per second, device to pinned host memory; None: as link_rate
    exchange_rate: Rate | None = None  # bytes per second that it sends to other ranks of a process group
    exchange_latency: Real = 0.0  # seconds of an exchange with other ranks, however small
    network_rate: Rate | None = (
        None  # bytes per second each way between its computer and others; None: as exchange_rate
    )
    ranks_sharing_weights: Positive = 1  # processes of its computer that share one copy of weights in host memory
    launch_overhead: Real = 0.0  # host seconds for each kernel or copy launched
    module_overhead: Real = 0.0  # host seconds for each call of a module, with what its Python code does
    streamed_overhead: Real = 0.0  # host seconds to load a streamed layer and use it once, without the launch
    resident_overhead: Real = 0.0  # host seconds for each use of a layer that is already on the device
    channels_last_gains: dict[str, Rate] = Field(default_factory=dict)  # measured speedup, by "role.dtype"

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU, whose memory is host memory."""
        return self.kind == "cpu"

    @property
    def display_name(self) -> str:
        """Name for use in a sentence."""
        return "this CPU" if self.kind in ("cpu", "loopback") else f"the {self.product_name or self.name}"

    def exchange_seconds(self, kind: str, count: int, size: int) -> float:
        """Return the seconds of `count` exchanges of `size` bytes in all, of one of the EXCHANGES."""
        rate = self.network_rate if kind.startswith("network") and self.network_rate else self.exchange_rate
        return count * self.exchange_latency + (size / rate if rate else 0.0)

    def exchange_link_seconds(self, kind: str, size: int) -> float:
        """Return the seconds of the link to the host that exchanges of `size` bytes in all take, each way.

        Those with ranks of its computer take some where they are no faster than the link: else they have one of their
        own, such as NVLink.
        """
        if self.is_cpu or kind not in ("exchange", "ring") or not self.link_rate or not self.exchange_rate:
            return 0.0
        return size / self.link_rate if self.exchange_rate <= self.link_rate else 0.0

    def arithmetic_rate(self, kind: str, dtype: str) -> float | None:
        """Return operations per second for `kind` in `dtype`; the rate of float32 if the dtype has none; else None."""
        if kind == "cudnn-first-attention":
            kind = "attention" if self.compute_capability in CUDNN_FIRST else "efficient-attention"
        general = "attention" if kind == "efficient-attention" else kind
        keys = (f"{kind}.{dtype}", f"{general}.{dtype}", dtype, f"{kind}.float32", f"{general}.float32", "float32")
        for key in keys:
            if key in self.arithmetic_rates:
                return self.arithmetic_rates[key]
        return None


class Amounts(NamedTuple):
    """What a kernel computes and moves, or a sum over kernels of one kind."""

    operations: int  # a multiply-add counts as two
    traffic: int  # bytes read and written on the device
    padding: int = 0  # operations that attention adds by padding its heads
    exponentials: int = 0  # of attention: one for each score
    tile_operations: int = 0  # of a matrix product: operations of one tile of its output
    copied: int = 0  # bytes read and written by copies to another layout, before and after the kernel
    serial: int = 0  # of a normalization: values that one block reads, one after another
    divisions: int = 0  # of a pointwise kernel: of indices, see `element_divisions`

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        """Return the sum with `times` kernels of `other`."""
        return Amounts(*(own + times * more for own, more in zip(self, other, strict=True)))


class KernelGroup(Record):
    """Sums over kernels of one kind and dtype and of similar arithmetic intensity (operations per byte).

    Exchanges with other ranks of a process group are kernels, too: "exchange" with ranks of the same computer,
    "network" with those of other computers, and "ring" and "network-ring" where attention is computed meanwhile.
    """

    kind: KernelKind
    dtype: str
    operations: Count  # a multiply-add counts as two
    # bytes read and written on the device, weights included; of an exchange, bytes sent or received, whichever is more,
    # and where these go to other computers, by all cards of this one that do so at the same time
    traffic: Count
    kernels: Positive  # number of kernels
    padding: Count = 0  # this one and those that follow: as in `Amounts`
    exponentials: Count = 0
    tile_operations: Count = 0
    copied: Count = 0
    serial: Count = 0
    divisions: Count = 0
    module_calls: Count = 0  # calls of modules before each kernel and after the one before it

    @property
    def amounts(self) -> Amounts:
        """The sums over its kernels."""
        return Amounts(*(getattr(self, name) for name in Amounts._fields))


_MOST_KEPT = 100_000
_groups: dict[tuple[Any, ...], KernelGroup] = {}
_works: dict[tuple[int, ...], tuple[KernelGroup, ...]] = {}  # by id() of their groups


def _with_known_groups(work: Any) -> Any:
    return [_known_group(each) for each in work] if isinstance(work, list | tuple) else work


def _known_group(given: Any) -> Any:
    """Return an equal group that exists already: blocks are alike, and to validate a record takes 15 us."""
    fields = vars(given) if isinstance(given, KernelGroup) else given
    if not isinstance(fields, dict):
        return given
    key = (*fields, *fields.values(), *map(type, fields.values()))
    try:
        known = _groups.get(key)
        if known is None:
            if len(_groups) >= _MOST_KEPT:
                _works.clear()
                _groups.clear()
            known = _groups[key] = given if isinstance(given, KernelGroup) else KernelGroup(**fields)
        return known
    except (TypeError, InputError):  # invalid, as its record will say
        return given


def _known_work(work: tuple[KernelGroup, ...]) -> tuple[KernelGroup, ...]:
    if len(_works) >= _MOST_KEPT:
        _works.clear()
    return _works.setdefault(tuple(map(id, work)), work)


class LayerWork(Record):
    """Work of one layer without interruption, or between layers (`layer` is "").

    Equal `work` is one object, of which what a plan computes is kept.
    """

    layer: str
    work: Annotated[tuple[KernelGroup, ...], BeforeValidator(_with_known_groups), AfterValidator(_known_work)]
    copied_in: Count = 0  # bytes that its own code copies from pageable host memory after it; the host waits for that
    holds: bool = False  # whether the layer's weights remain on the device until those of the next layer go
    host_waits: bool = False  # whether the host synchronizes with the device after it


class Machine(Record):
    """The computer to run on. Free and used bytes are those at the time of the query."""

    accelerators: tuple[Accelerator, ...]
    ram: Positive  # bytes that this process may use, cgroup limits included
    ram_free: Count | None = None  # bytes that this process could still allocate
    ram_used: Count | None = None  # bytes that this process uses already
    ram_limit: Positive | None = None  # cgroup limit in bytes, if it is less than the computer's RAM
    pinnable: Count | None = None  # bytes that could be page-locked for copies to a card
    cores: Positive  # number of cores that this process may use
    cpu: str | None = None  # commercial name of the processor
    disk_rate: Rate | None = None  # bytes per second, reading without the page cache
    notes: tuple[str, ...] = ()  # what was not measured, and why
