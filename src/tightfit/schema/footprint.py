"""The nouns of what is known before a plan is made: what a pipeline is made of, and what it does for a request.

Activations are tensors on the device that are not weights, in bytes as the CUDA caching allocator hands them out.
Work does not depend on a machine: how long it takes is arithmetic by that machine's rates. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, Strict, model_validator

from tightfit.errors import InputError, RequestError
from tightfit.schema.base import Count, Positive, Rate, Real, Record

__all__ = [
    "LEFT_OUT",
    "STRIPS",
    "BlockUse",
    "Component",
    "ComponentCall",
    "FeatureMaps",
    "Footprint",
    "KernelGroup",
    "LayerWork",
    "Phase",
    "Request",
    "Role",
    "StripProfile",
    "StripStageProfile",
    "Variant",
    "WeightBlock",
]

FeatureMaps = Literal["device", "host", "recompute"]
Role = Literal["encoder", "denoiser", "autoencoder", "other"]
# of what an autoencoder's pass takes as it is, what strips of it may take; and where maps wait meanwhile
STRIPS: Mapping[str, tuple[int, FeatureMaps]] = {
    "strips of 1/4, maps on the device": (4, "device"),
    "strips of 1/4, maps in host memory": (4, "host"),
    "strips of 1/16, maps on the device": (16, "device"),
    "strips of 1/16, maps in host memory": (16, "host"),
    "strips of 1/64, maps on the device": (64, "device"),
    "strips of 1/64, maps in host memory": (64, "host"),
}
LEFT_OUT = ("variants", *STRIPS)  # what a footprint may leave out


# an argument of a call: itself, or what kind and size it is of
Argument = Annotated[bool, Strict()] | Annotated[int, Strict()] | Annotated[float, Strict()] | str | None


class Request(Record):
    """What one call asks for. Fields left out take the pipeline's own defaults.

    `arguments` are others of the call's, under the pipeline's own names: plain numbers, yes and no, and None as they
    are (`max_sequence_length`, `use_resolution_binning`, `true_cfg_scale`); tensors, pictures and texts by their kind
    and size ("float32 1x4x64x64", "RGB image 512x512", "9 x RGB image 64x64", "text").
    """

    error: ClassVar[type[InputError]] = RequestError

    height: Positive | None = None  # pixels
    width: Positive | None = None
    frames: Positive | None = None
    batch: Positive = 1
    steps: Positive | None = None
    guidance: Real | None = None
    arguments: dict[str, Argument] = Field(default_factory=dict)

    @property
    def size(self) -> str:
        """Of a picture or clip, as far as it is said: "1280×720, 81 frames"."""
        pixels = f"{self.width}×{self.height}" if self.height and self.width else ""
        return ", ".join(filter(None, (pixels, f"{self.frames} frames" if self.frames else "")))

    @property
    def described(self) -> str:
        """In a few words."""
        batch = f"{self.batch} at once" if self.batch > 1 else ""
        others = (f"{name}={value}" for name, value in self.arguments.items())
        return ", ".join(filter(None, (self.size, batch, *others))) or "its usual request"


class WeightBlock(Record):
    """Weights that move together: a repeated block, or what is left outside the blocks."""

    name: str  # dotted path inside the component; "" for what is left
    bytes: Count
    dtypes: dict[str, Count] = Field(default_factory=dict)  # bytes by dtype
    matrices: dict[str, Count] = Field(default_factory=dict)  # of a leaf's, those of linear layers' matrices
    rows: Count = 0  # of these matrices
    moves_with: str = ""  # of a small leaf, the one before it in the same block that it moves together with


class Component(Record):
    """One network of a pipeline, under diffusers' own name."""

    name: str
    class_name: str
    role: Role
    bytes: Count
    allocator_bytes: Count = 0  # bytes that an allocator takes for its weights, one by one; 0: as many as they are
    dtypes: dict[str, Count] = Field(default_factory=dict)
    blocks: tuple[WeightBlock, ...] = ()
    layers: tuple[WeightBlock, ...] = ()  # single layers that own large parameters, the least that can move by itself
    small_tensor_bytes: Count = 0  # tensors outside of these
    has_skip_connections: bool = False  # activations of early units wait for late ones (a U-Net)
    compiled: bool = False  # parts of it are compiled, which hooks keep out of
    convolves: bool = False  # most of what it convolves with are windows on pictures, not single points or clips
    has_forward: bool = True  # False: it has no forward and no parts, and pipelines read its weights themselves
    head_widths: tuple[Positive, ...] = ()  # of its attention, as far as its parts say so

    @property
    def main_dtype(self) -> str | None:
        """Of most of its weights."""
        return max(self.dtypes, key=lambda dtype: self.dtypes[dtype], default=None)


class KernelGroup(Record):
    """Kernels of one kind in one dtype, and alike in operations for each byte, together."""

    kind: Literal["matmul", "convolution", "attention", "memory"]
    dtype: str
    operations: Count  # a multiplication and an addition are two
    traffic: Count  # bytes read and written on the device, weights too
    kernels: Positive


class LayerWork(Record):
    """What one leaf does at a time; "" is what is done between leaves."""

    layer: str
    work: tuple[KernelGroup, ...]
    host_waits: bool = False  # whether the host waits, after it, for all that it gave the device


class BlockUse(Record):
    """One turn of a unit while its component works; "" is what the component does between its units."""

    block: str
    live_bytes_at_start: Count  # bytes of activations that are there when it begins
    peak: Count  # the most bytes of activations there are while it works, those included
    layer_work: tuple[LayerWork, ...] = ()  # of its leaves, in their true order

    @property
    def work(self) -> tuple[KernelGroup, ...]:
        """All that is done meanwhile."""
        return tuple(work for turn in self.layer_work for work in turn.work)


class ComponentCall(Record):
    """A component at work once, from its inputs to its outputs, and how often it does so in the same way."""

    component: str
    method: str  # "forward", "encode", "decode"; the path of a part that is called by itself
    runs: Positive = 1
    peak: Count  # bytes of activations
    block_uses: tuple[BlockUse, ...]  # in their true order
    time_scale: Rate = 1.0  # times as long as a machine's rates say that its work takes: learned from runs


class StripStageProfile(Record):
    """What is done in one stage of a way: something at its beginning, and then strip by strip.

    A turn that comes in fewer strips than there are, as what makes few rows of many does, comes in the first of them
    and then evenly, and does as much each time, about.
    """

    strips: Positive
    prefetches: bool = False  # what it keeps leaves, and what the next strip takes comes, while a strip is computed
    before_strips: tuple[LayerWork, ...] = ()  # before the first strip
    layer_work: tuple[LayerWork, ...] = ()  # in the order in which a strip takes them, for all strips together
    strip_counts: tuple[Positive, ...] = ()  # strips in which each of them comes
    copies: Count = 0  # over the link, that the host launches
    bytes_in: Count = 0  # of maps, over the link
    bytes_out: Count = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.strip_counts) != len(self.layer_work) or any(runs > self.strips for runs in self.strip_counts):
            raise ValueError(
                f"{len(self.layer_work)} turns in {self.strips} strips cannot come {list(self.strip_counts)} times"
            )
        return self

    @property
    def work(self) -> tuple[KernelGroup, ...]:
        """All that is done meanwhile."""
        return tuple(work for turn in (*self.before_strips, *self.layer_work) for work in turn.work)


class StripProfile(Record):
    """How else the autoencoder's passes of a phase can be done, with the same numbers: in strips."""

    strip_bytes: Positive  # bytes for them
    feature_maps: FeatureMaps  # where maps wait between them
    allocator_bytes: Count  # bytes that an allocator needs for activations
    host_bytes: Count  # bytes of host memory in which maps wait
    batch_items: Positive = 1  # of a batch, one after another
    stages: tuple[StripStageProfile, ...]  # for each of them, in their order


class Phase(Record):
    """A stretch of the call in which components of the same role work."""

    name: str
    peak: Count  # bytes of activations, between passes too
    peak_between_calls: Count = 0  # the most of these bytes while no pass is worked through
    allocator_bytes: (
        Count  # bytes that an allocator needs for them, all that it holds and does not use given back in need
    )
    calls: tuple[ComponentCall, ...]  # one of each kind
    call_order: tuple[Count, ...]  # which of them came when
    other_work: tuple[KernelGroup, ...] = ()  # work outside all components: a scheduler's
    unused_blocks: tuple[str, ...] = ()  # units, as component.unit, that none of its passes used
    conditional_blocks: tuple[str, ...] = ()  # units that some passes of their component used and others did not
    strip_options: tuple[StripProfile, ...] = ()  # other than as it was measured

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counted = [self.call_order.count(index) for index in range(len(self.calls))]
        if counted != [each.runs for each in self.calls]:
            raise ValueError(f"order names passes {counted} times, their runs say {[p.runs for p in self.calls]}")
        return self

    @property
    def time_scale(self) -> float:
        """Of its passes, which all have the same."""
        return self.calls[0].time_scale if self.calls else 1.0

    @property
    def live_bytes_at_start(self) -> int:
        """Bytes of activations that are there before any of its passes begins, and stay."""
        return max((done.block_uses[0].live_bytes_at_start for done in self.calls if done.block_uses), default=0)

    def strip_bytes(self, share: int) -> int:
        """A `share`-th of the bytes that its passes take as they are: for strips."""
        return max((self.peak - self.live_bytes_at_start) // share, 1)

    def with_strip_options(self, ways: Iterable[StripProfile]) -> Phase:
        """The same with these beside its own, those of most bytes first."""
        every = {(-way.strip_bytes, way.feature_maps): way for way in (*ways, *self.strip_options)}
        return self.model_copy(update={"strip_options": tuple(every[key] for key in sorted(every))})


class Variant(Record):
    """How else denoisers can work, with the same numbers: on a part of what they are given at a time."""

    cfg: Literal["sequential"] | None = None  # a step's two predictions, each by itself
    max_batch: Positive | None = None  # items that work at a time
    ffn_chunk: Positive | None = None  # bytes for the inner maps of feed-forwards
    by_blocks: bool = False  # each block works on all parts before the next begins: what streams does it like that
    phases: tuple[Phase, ...]  # all in which denoisers work, as they are then

    @property
    def splits_batch(self) -> bool:
        """Whether the batch is."""
        return self.cfg is not None or self.max_batch is not None

    @property
    def fields(self) -> dict[str, object]:
        """What a plan says of each denoiser."""
        return {"cfg": self.cfg, "max_batch": self.max_batch, "ffn_chunk": self.ffn_chunk}


class Footprint(Record):
    """What a pipeline is made of; with `phases`, what it does for `request`."""

    pipeline: str
    components: tuple[Component, ...]
    request: Request | None = None
    phases: tuple[Phase, ...] = ()
    variants: tuple[Variant, ...] = ()  # other than as the phases were measured
    not_measured: tuple[str, ...] = ()  # of LEFT_OUT, what was not measured, as no plan was to be made by it
    from_call_log: bool = False  # made from the passes of a call that was over, so that its least budget is not sure

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if unknown := set(self.not_measured).difference(LEFT_OUT):
            raise ValueError(f"left_out names {sorted(unknown)}, which is none of {list(LEFT_OUT)}")
        return self

    @property
    def activation_peak(self) -> int:
        return max((phase.peak for phase in self.phases), default=0)

    @property
    def denoisers(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components if component.role == "denoiser")

    @property
    def denoiser_phases(self) -> tuple[int, ...]:
        """The places of the phases in which denoisers work."""
        names = set(self.denoisers)
        return tuple(place for place, phase in enumerate(self.phases) if names & {p.component for p in phase.calls})

    def with_variant(self, variant: Variant | None) -> Footprint:
        """The same with denoisers at work as `variant` says; None: as they do here."""
        if variant is None:
            return self
        phases = list(self.phases)
        for place, phase in zip(self.denoiser_phases, variant.phases, strict=True):
            phases[place] = phase
        return self.model_copy(update={"phases": tuple(phases), "variants": ()})

    def merged_with(self, other: Footprint) -> Footprint:
        """The same with what `other`, of the same call, does not leave out; itself where that is not the same call."""
        bare, same = ([p.model_copy(update={"strip_options": ()}) for p in each.phases] for each in (self, other))
        if bare != same or other.components != self.components:
            return self
        phases = [
            mine.with_strip_options(theirs.strip_options)
            for mine, theirs in zip(self.phases, other.phases, strict=True)
        ]
        variants = other.variants if "variants" in self.not_measured else self.variants
        left = tuple(part for part in self.not_measured if part in other.not_measured)
        return self.model_copy(update={"phases": tuple(phases), "variants": variants, "not_measured": left})
