"""A Plan: every decision about a run, for each component and for autoencoders. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, Strict, model_validator

from tightfit.errors import PlanError, unknown_name
from tightfit.schema.attention import ATTENTION_NAMES, BACKENDS
from tightfit.schema.base import Count, Positive, Rate, Real, Record, Size
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import FeatureMaps
from tightfit.schema.machine import Budget
from tightfit.schema.network_part import Granularity, NetworkPart, Placement
from tightfit.schema.request import Request
from tightfit.schema.step_cache import NamedCache
from tightfit.schema.stores import STORES, OffloadTarget, StoreKind
from tightfit.schema.vae_plan import VaePlan
from tightfit.units import format_bytes

__all__ = [
    "TECHNIQUES",
    "Cfg",
    "ComponentPlan",
    "ComponentRun",
    "FeatureMaps",
    "Granularity",
    "NetworkPart",
    "PhaseForecast",
    "Placement",
    "Plan",
    "Reason",
    "Storage",
    "VaePlan",
    "check_techniques",
]

Storage = Literal["as-loaded", "float8_e4m3fn", "float8_e5m2", "int8"]
Cfg = Literal["batched", "sequential"]
ContextAttention = Literal["gathered", "ring", "heads"]
CfgGroups = Annotated[int, Strict(), Field(ge=1, le=2)]
ComputeDtype = Literal["float32", "float16", "bfloat16"]
if TYPE_CHECKING:  # which cannot make a Literal of a registry
    Attention: TypeAlias = str
else:
    Attention = Literal[ATTENTION_NAMES]


Auto = Annotated[bool | None, BeforeValidator(lambda said: None if said == "auto" else said)]
# lossy techniques, by the names that `allow` takes
TECHNIQUES: Mapping[str, str] = {
    "fp8": "weights stored in eight bits, widened for each use",
    "int8": "matrices of linear layers stored as eight-bit integers, by torchao",
    "sage-attention": "attention with queries and keys rounded to eight bits, by SageAttention",
    "blended-tiling": "autoencoder tiles decoded on their own and blended where they overlap",
    "step-cache": "denoisers reuse in some steps what they computed in earlier ones",
}


class Reason(Record):
    """Why one decision was made, as two halves of a sentence."""

    decision: str
    because: str
    detail: bool = False  # about kernels: shown with --verbose


class PhaseForecast(Record):
    """Predicted time and memory of one phase."""

    name: str
    seconds: Real
    peak_bytes: Count  # reserved by the allocator of the pipeline's own device
    other_devices: dict[str, Count] = Field(default_factory=dict)  # the same of the plan's other devices, by name


class ComponentRun(Record):
    """Consecutive calls of one component, as one entry of a plan's schedule."""

    component: str
    method: str = "forward"
    runs: Positive = 1  # consecutive calls
    unused_blocks: tuple[str, ...] = ()  # dotted paths of modules that these calls do not use
    prefetch: Count | None = None  # bytes loaded while the previous component finishes; None: as many as fit


class ComponentPlan(Record):
    """Where one component's weights are, in which form, and how it computes.

    With placement "stream", `resident_layers` are loaded once for as long as the component runs, and all other layers
    pass through a ring buffer of `ring_buffer` bytes on the device, once for each use. Where `weight_memory` is given
    alone, the planner chooses both.
    """

    device: str | None = None  # device on which it computes; None: the plan's device
    split: dict[str, NetworkPart] = Field(default_factory=dict)  # its later parts, by the device on which each computes
    placement: Placement = "resident"  # on the device always, while its phase runs, or layer by layer
    offload_to: OffloadTarget = "cpu"  # where its weights are while they are not on the device
    pinned: bool | None = None  # page-lock them in host memory; None: where the system allows it
    weight_memory: Size | None = None  # bytes on the device for weights, ring buffer included; None: the planner's
    granularity: Granularity | None = None  # what is loaded together: a block's layers, or each layer by itself
    ring_buffer: Count | None = None  # bytes
    resident_layers: tuple[str, ...] | None = None  # dotted paths of layers, or of blocks
    storage: Storage = "as-loaded"  # dtype in which weights are kept
    compute_dtype: ComputeDtype | None = None  # to which stored weights are cast; None: the dtype as loaded
    skip_patterns: tuple[str, ...] | None = None  # regular expressions of parameters kept as loaded; None: defaults
    channels_last: Auto = False  # convolution weights; None, or "auto": where that was measured to be faster
    max_batch: Positive | None = None  # items of a batch computed at a time; None: all
    cfg: Cfg | None = None  # a step's two guidance predictions in one call or in two; None: as the pipeline does
    ffn_chunk: Size | None = None  # bytes for the inner activations of feed-forward layers; None: all tokens at once
    exported: str | None = None  # file of an exported network that runs in place of this one's code
    compiled: bool = False  # run that network compiled by AOTInductor
    gradient_checkpointing: Auto = None  # run blocks again in a backward pass; None, or "auto": unless resident
    attention: Attention = "auto"  # backend; "auto": torch's choice, or chunked where that would keep all scores
    cache: NamedCache | None = None  # denoisers: what is kept from step to step, to leave out work

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.storage == "as-loaded":
            for field in ("skip_patterns", "compute_dtype"):
                if getattr(self, field) is not None:
                    raise PlanError(f"{field} needs storage=float8_e4m3fn, float8_e5m2 or int8", field=field)
        if self.cfg == "sequential" and self.max_batch is not None:
            raise PlanError(f"cfg=sequential halves each batch, max_batch={self.max_batch} limits it: leave one out")
        if self.exported is not None and (self.ffn_chunk or self.attention != "auto"):
            raise PlanError(f"the layers of exported={self.exported} are fixed: leave ffn_chunk and attention out")
        if self.split and self.exported is not None:
            raise PlanError(f"the blocks of exported={self.exported} are one graph: leave split out", field="split")
        if self.cache is not None and (self.exported is not None or self.split):
            other = f"exported={self.exported}" if self.exported is not None else f"split over {', '.join(self.split)}"
            raise PlanError(f"cache={self.cache.strategy} needs the network's own blocks on one device, not {other}")
        if self.device in self.split:
            raise PlanError(f"split: {self.device} is where the first part is already", device=self.device)
        if self.compiled and (self.exported is None or self.storage != "as-loaded" or self.placement == "stream"):
            raise PlanError(
                "compiled needs exported=FILE, weights as loaded and all of them on the device: here are "
                f"exported={self.exported}, storage={self.storage}, placement={self.placement}",
                field="compiled",
            )
        if self.placement != "stream":
            for field in ("weight_memory", "granularity", "ring_buffer", "resident_layers"):
                if getattr(self, field) is not None:
                    raise PlanError(f"{field} only means something with placement=stream", field=field)
        return self

    def parts(self, own: str) -> dict[str, ComponentPlan]:
        """Return the plan of each part, by device, in the order in which they run; `own` is the device of the first."""
        plans = {own: self.model_copy(update={"split": {}}) if self.split else self}
        for name, part in self.split.items():
            fields: dict[str, object] = {"device": name, "split": {}}
            plans[name] = self.model_copy(update=fields | part.fields(self.placement))
        return plans

    @property
    def store(self) -> StoreKind:
        """What is known of the store of its weights."""
        return STORES[self.offload_to]

    @property
    def splits_batch(self) -> bool:
        """Whether batches are split."""
        return self.max_batch is not None or self.cfg == "sequential"

    @property
    def checkpoints_gradients(self) -> bool:
        """Whether its blocks keep only their inputs for a backward pass, and are run again there."""
        return self.placement != "resident" if self.gradient_checkpointing is None else self.gradient_checkpointing

    def moves(self, *, separate: bool) -> bool:
        """Whether weights are loaded and evicted; `separate`: onto a device with memory of its own."""
        return self.placement != "resident" and (separate or not self.store.is_host_memory)

    @property
    def technique(self) -> str | None:
        """The lossy technique by which its weights are stored."""
        return None if self.storage == "as-loaded" else "int8" if self.storage == "int8" else "fp8"

    def lossy(self, name: str) -> list[str]:
        """Return what changes the numbers of the component `name` in every call, each named by its technique."""
        stored = [f"{self.technique}: {name} is stored in {self.storage}"] if self.technique else []
        backend = BACKENDS.get(self.attention)
        return stored + ([f"{backend.technique}: attention of {name}"] if backend and backend.technique else [])

    @property
    def described(self) -> str:
        """All that differs from the defaults, on one line."""
        parts = [f"on {self.device}"] if self.device else []
        parts += [part.described(name) for name, part in self.split.items()]
        parts += [self.placement] + ([] if self.store.is_host_memory else [f"from {self.store.title}"])
        if self.ring_buffer is not None and self.resident_layers is not None:
            resident, ring = len(self.resident_layers), format_bytes(self.ring_buffer)
            parts += [f"by {self.granularity}", f"{resident} resident", f"ring buffer of {ring}"]
        parts += ["pinned"] if self.pinned else []
        parts += [] if self.storage == "as-loaded" else [f"stored as {self.storage}"]
        parts += ["channels-last"] if self.channels_last else []
        parts += [f"at most {self.max_batch} items at a time"] if self.max_batch else []
        parts += [f"{self.cfg} guidance"] if self.cfg else []
        parts += [f"feed-forward within {format_bytes(self.ffn_chunk)}"] if self.ffn_chunk else []
        checkpoints = self.gradient_checkpointing
        parts += [] if checkpoints is None else [f"gradient checkpointing {'on' if checkpoints else 'off'}"]
        parts += [f"{'compiled, ' * self.compiled}as exported in {self.exported}"] if self.exported else []
        parts += [self.cache.described] if self.cache else []
        return ", ".join(parts if self.attention == "auto" else [*parts, f"attention by {self.attention}"])


class Plan(Record):
    """Every decision about a run, and the reason for each."""

    device: str = "cpu"
    level: Annotated[int, Strict(), Field(ge=0, le=3)] | None = None
    request: Request | None = None
    budget: Budget | None = None
    device_map: DeviceMap | None = None  # what a user fixed of `components`; None: nothing
    components: dict[str, ComponentPlan] = Field(default_factory=dict)
    vae: VaePlan = VaePlan()
    offload_activations: bool = False  # offload activations that are kept for a later block to host memory
    context: Positive = 1  # ranks of a process group that share the rows of denoisers and autoencoders
    context_attention: ContextAttention = "gathered"  # how their attention reaches the keys of other ranks
    cfg_groups: CfgGroups = 1  # groups of so many ranks; of 2, each computes one guidance prediction
    rank_shares: tuple[Rate, ...] = ()  # of the rows, in proportion, of each rank of all groups; (): equal
    expandable_segments: bool = False  # of the device's allocator: less reserved memory is lost to fragmentation
    schedule: tuple[ComponentRun, ...] = ()  # order of component calls, by which the next component is prefetched
    reasons: tuple[Reason, ...] = ()
    forecast: tuple[PhaseForecast, ...] = ()  # of the first call, by phase

    @property
    def lossy(self) -> tuple[str, ...]:
        """What may change the output, each named by its technique and where it applies."""
        named = [what for name, component in self.components.items() for what in component.lossy(name)]
        caches = {name: component.cache for name, component in self.components.items() if component.cache}
        named += [what for name, cache in caches.items() for what in cache.lossy(name)]
        if self.vae.tile is not None and not self._one_tile():
            where = "" if self.vae.strips is None else ", where they cannot be in strips"
            named.append(f"blended-tiling: pictures larger than {self.vae.tile} px are decoded in tiles{where}")
        return tuple(named)

    @property
    def lossless(self) -> bool:
        """Whether the output is the same as without a plan, up to rounding."""
        return not self.lossy

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices on which components compute, the pipeline's own first."""
        own = [component.device for component in self.components.values() if component.device is not None]
        split = [name for component in self.components.values() for name in component.split]
        return tuple(dict.fromkeys((self.device, *own, *split)))

    @property
    def ranks(self) -> tuple[str, ...]:
        """How ranks of a process group compute together, in sentences; () for one rank."""
        shares = f" as {' : '.join(f'{share:g}' for share in self.rank_shares)}" if self.rank_shares else ""
        rows = f"{self.context} ranks share the rows{shares}, attention {self.context_attention}"
        groups = f"{self.cfg_groups} groups of ranks, one for each guidance prediction"
        return (rows,) * (self.context > 1) + (groups,) * (self.cfg_groups > 1)

    def parts_of(self, name: str) -> dict[str, ComponentPlan]:
        """Return the plan of each part of the component `name`, by the device on which it computes."""
        return self.components.get(name, ComponentPlan()).parts(self.device_of(name))

    def device_of(self, name: str) -> str:
        """Return the device on which the component `name` computes, or its first part."""
        component = self.components.get(name)
        return self.device if component is None or component.device is None else component.device

    def predicted_peak(self, name: str) -> int:
        """Return the predicted peak of reserved bytes on the device `name`; 0 without a forecast."""
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
        lines += ["  activations for later blocks: offloaded to host memory"] if self.offload_activations else []
        lines += [f"  {said}" for said in self.ranks]
        lines += [f"  lossy: {text}" for text in self.lossy] or ["  lossless"]
        lines += [f"  because: {reason.decision}: {reason.because}" for reason in self.reasons]
        return "\n".join(lines)


def check_techniques(names: Iterable[str]) -> tuple[str, ...]:
    """Return `names` as a tuple. Raises PlanError, with the nearest name, if one is not a lossy technique."""
    if isinstance(names, str):
        names = (names,)
    chosen = tuple(names)
    for name in chosen:
        if name not in TECHNIQUES:
            raise PlanError(unknown_name("technique", str(name), TECHNIQUES), name=str(name))
    return chosen
