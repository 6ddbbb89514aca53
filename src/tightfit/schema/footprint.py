"""Records of what is known before planning: a pipeline's components, and their memory and work for a request.

Activations are all tensors on the device except weights, in bytes as rounded by the CUDA caching allocator. Work is
independent of the machine: its time is computed from that machine's rates. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.schema.base import Count, Positive, Rate, Record
from tightfit.schema.machine import EXCHANGES, KernelGroup, LayerWork
from tightfit.schema.request import Request
from tightfit.schema.step_cache import CacheTrace, StepCache

__all__ = [
    "OPTIONAL_PARTS",
    "STRIP_OPTIONS",
    "BlockUse",
    "Component",
    "ComponentCall",
    "FeatureMaps",
    "Footprint",
    "Phase",
    "Role",
    "StripProfile",
    "StripStageProfile",
    "Variant",
    "WeightBlock",
]

FeatureMaps = Literal["device", "host", "recompute"]
Role = Literal["encoder", "denoiser", "autoencoder", "other"]
# exact tiling of an autoencoder, by the option's name: of the bytes that an untiled call adds, which part (1/n) strips
# may take, and where feature maps are
STRIP_OPTIONS: Mapping[str, tuple[int, FeatureMaps]] = {
    "strips of 1/4, maps on the device": (4, "device"),
    "strips of 1/4, maps in host memory": (4, "host"),
    "strips of 1/16, maps on the device": (16, "device"),
    "strips of 1/16, maps in host memory": (16, "host"),
    "strips of 1/64, maps on the device": (64, "device"),
    "strips of 1/64, maps in host memory": (64, "host"),
}
OPTIONAL_PARTS = ("variants", *STRIP_OPTIONS)  # parts of a footprint that may be left unmeasured


class WeightBlock(Record):
    """Weights of a repeated block, of all that is outside the blocks, or of a single layer."""

    name: str  # dotted path inside the component; "" for all outside the blocks
    bytes: Count
    dtypes: dict[str, Count] = Field(default_factory=dict)  # bytes by dtype
    matrices: dict[str, Count] = Field(default_factory=dict)  # layers only: bytes of nn.Linear matrices by dtype
    rows: Count = 0  # total rows of these matrices
    moves_with: str = ""  # small layers only: earlier layer of the same block with which it is loaded


class Component(Record):
    """One network of a pipeline, under its name in diffusers."""

    name: str
    class_name: str
    role: Role
    bytes: Count
    allocator_bytes: Count = 0  # bytes reserved if its tensors are allocated one by one; 0: same as `bytes`
    dtypes: dict[str, Count] = Field(default_factory=dict)  # bytes by dtype
    blocks: tuple[WeightBlock, ...] = ()
    layers: tuple[WeightBlock, ...] = ()  # modules that own large parameters: the smallest units that can be loaded
    small_tensors: Count = 0  # number of tensors outside of `layers`
    has_skip_connections: bool = False  # activations of early blocks are kept for late ones (a U-Net)
    compiled: bool = False  # contains compiled modules, inside which no hooks are placed
    convolves: bool = False  # more weights in 2D convolutions with overlapping windows than in 3D ones
    has_forward: bool = True  # False: no forward and no submodules; the pipeline reads its weights directly
    head_widths: tuple[Positive, ...] = ()  # head dimensions of its attention layers, as far as known
    gradient_bytes: Count = 0  # bytes of its parameters' gradients, which are where the parameters are

    @property
    def main_dtype(self) -> str | None:
        """Dtype of most of its weights; None without weights."""
        return max(self.dtypes, key=lambda dtype: self.dtypes[dtype], default=None)


class BlockUse(Record):
    """One execution of a block in a component's call, or of the code between blocks (`block` is "")."""

    block: str
    live_bytes_at_start: Count  # bytes of activations on the device when it begins
    peak: Count  # peak bytes of activations while it runs, those at the start included
    layer_work: tuple[LayerWork, ...] = ()  # in execution order

    @property
    def work(self) -> tuple[KernelGroup, ...]:
        """All of its kernels."""
        return tuple(work for turn in self.layer_work for work in turn.work)


class ComponentCall(Record):
    """One call of a component, from its inputs to its outputs, and the number of calls of the same kind."""

    component: str
    method: str  # "forward", "encode", "decode"; or the path of a submodule that the pipeline calls directly
    runs: Positive = 1  # number of such calls
    peak: Count  # bytes of activations
    block_uses: tuple[BlockUse, ...]  # in execution order
    backward_from: Count | None = None  # index of the block use with which its backward pass begins; None: it has none
    left_out_from: Count | None = None  # block uses after which a step cache leaves out what is not here; None: nothing
    after_blocks: tuple[str, ...] = ()  # dotted paths of modules outside of blocks that run after its last block only
    paired: bool = False  # each two of them take the same latents: a step's two guidance predictions
    time_scale: Rate = 1.0  # factor on the time that a machine's rates give for its work, from earlier calls
    is_part: bool = False  # only the blocks of one part of the component, which is split over devices, …
    crossing_bytes: Count = 0  # … with so many bytes of inputs and outputs copied between devices
    overlaps: bool = False  # … and which works on one chunk of a batch while other parts work on others

    @property
    def shares_rows(self) -> bool:
        """Whether other ranks compute some of its rows: there are exchanges between its layers, not only at its end."""
        works = [work for use in self.block_uses for work in use.layer_work]
        last = max((number for number, work in enumerate(works) if work.layer), default=0)
        return any(group.kind in EXCHANGES for work in works[:last] for group in work.work)


class StripStageProfile(Record):
    """Work of one stage of a strip option: once before the first strip, then strip by strip.

    Layer work that runs in fewer strips than there are runs in the first strip and then at even intervals until its
    last one, about equally much each time: earlier operations are done before later ones, and an operation that reduces
    many rows to few needs several strips for a row.
    """

    strips: Positive  # number of strips
    prefetches: bool = False  # strip outputs are offloaded, and the next strip's inputs loaded, while a strip computes
    before_strips: tuple[LayerWork, ...] = ()  # before the first strip
    layer_work: tuple[LayerWork, ...] = ()  # in the order within a strip, summed over all strips
    strip_counts: tuple[Positive, ...] = ()  # number of strips in which each of `layer_work` runs
    strip_ends: tuple[Positive, ...] = ()  # number of the strip after the last one in which each runs
    copies: Count = 0  # number of copies over the link that the host launches
    bytes_in: Count = 0  # bytes of feature maps copied from host to device
    bytes_out: Count = 0  # bytes of feature maps copied from device to host

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counts, ends = list(self.strip_counts), list(self.strip_ends)
        if not len(counts) == len(ends) == len(self.layer_work) or any(
            not runs <= end <= self.strips for runs, end in zip(counts, ends, strict=True)
        ):
            raise ValueError(
                f"{len(self.layer_work)} layers in {self.strips} strips cannot run in {counts} of them before {ends}"
            )
        return self

    @property
    def work(self) -> tuple[KernelGroup, ...]:
        """All of its kernels."""
        return tuple(work for turn in (*self.before_strips, *self.layer_work) for work in turn.work)


class StripProfile(Record):
    """A strip option: memory and work of a phase's autoencoder calls in exact strips, with the same numbers."""

    strip_bytes: Positive  # bytes for strips
    feature_maps: FeatureMaps  # where feature maps between stages are kept
    allocator_bytes: Count  # bytes that an allocator needs for activations
    host_bytes: Count  # bytes of host memory for feature maps
    batch_items: Positive = 1  # items of a batch, which run one after another
    stages: tuple[StripStageProfile, ...]  # of one item, in execution order


class Phase(Record):
    """Consecutive calls of components of the same role within one pipeline call."""

    name: str
    peak: Count  # bytes of activations, between calls too
    peak_between_calls: Count = 0  # peak bytes of activations while no component runs
    allocator_bytes: Count  # least reserved bytes that an allocator needs for activations, if it can release its cache
    calls: tuple[ComponentCall, ...]  # one of each kind
    call_order: tuple[Count, ...]  # index in `calls` of each call, in execution order
    other_work: tuple[KernelGroup, ...] = ()  # work outside all components: a scheduler's
    unused_blocks: tuple[str, ...] = ()  # blocks, as component.block, that none of its calls uses
    conditional_blocks: tuple[str, ...] = ()  # blocks that only some calls of their component use
    strip_options: tuple[StripProfile, ...] = ()  # ways to run it in strips; without one it runs as measured

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counted = [self.call_order.count(index) for index in range(len(self.calls))]
        if counted != [each.runs for each in self.calls]:
            raise ValueError(f"call_order names calls {counted} times, their runs say {[p.runs for p in self.calls]}")
        return self

    @property
    def time_scale(self) -> float:
        """`time_scale` of its calls, which is the same for all; 1 without calls."""
        return self.calls[0].time_scale if self.calls else 1.0

    @property
    def live_bytes_at_start(self) -> int:
        """Bytes of activations on the device before its calls begin: the highest over its kinds of calls."""
        return max((done.block_uses[0].live_bytes_at_start for done in self.calls if done.block_uses), default=0)

    def strip_limit(self, divisor: int) -> int:
        """Return 1/`divisor` of the bytes that its untiled calls add to those at their start: the limit for strips."""
        return max((self.peak - self.live_bytes_at_start) // divisor, 1)

    def with_strip_options(self, ways: Iterable[StripProfile]) -> Phase:
        """Return a copy with `ways` added to its strip options, by descending bytes; its own win over equal ones."""
        every = {(-way.strip_bytes, way.feature_maps): way for way in (*ways, *self.strip_options)}
        return self.model_copy(update={"strip_options": tuple(every[key] for key in sorted(every))})


class Variant(Record):
    """Another way to run denoisers, with the same numbers: on a part of their inputs at a time."""

    cfg: Literal["sequential"] | None = None  # a step's two guidance predictions in two calls
    max_batch: Positive | None = None  # items of a batch computed at a time
    ffn_chunk: Positive | None = None  # bytes for the inner activations of feed-forward layers
    gradient_checkpointing: bool | None = None  # run blocks again in backward passes; None: the call has none
    by_blocks: bool = False  # each block runs on all parts before the next block does, as streamed denoisers do
    phases: tuple[Phase, ...]  # all phases in which denoisers run, measured this way

    @property
    def splits_batch(self) -> bool:
        """Whether the batch is split."""
        return self.cfg is not None or self.max_batch is not None

    @property
    def fields(self) -> dict[str, object]:
        """Its values for a denoiser's ComponentPlan."""
        fields: dict[str, object] = {"cfg": self.cfg, "max_batch": self.max_batch, "ffn_chunk": self.ffn_chunk}
        again = self.gradient_checkpointing
        return fields if again is None else fields | {"gradient_checkpointing": again}


class Footprint(Record):
    """Components of a pipeline and, if it has `phases`, their memory (bytes) and work (operations) for `request`."""

    pipeline: str
    components: tuple[Component, ...]
    request: Request | None = None
    steps: Positive | None = None  # denoising steps of the call, as asked or by default
    phases: tuple[Phase, ...] = ()
    variants: tuple[Variant, ...] = ()  # other ways to run denoisers than in `phases`
    not_measured: tuple[str, ...] = ()  # members of OPTIONAL_PARTS that were not measured, because no plan needed them
    caches: dict[str, StepCache] = Field(default_factory=dict)  # step caches by component, with which it was measured
    kept: tuple[CacheTrace, ...] = ()  # what these caches kept in the measured call, which is in its phases' peaks
    from_call_log: bool = False  # made from the log of a finished call, so that its least budget is uncertain

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if unknown := set(self.not_measured).difference(OPTIONAL_PARTS):
            raise ValueError(f"not_measured names {sorted(unknown)}, which is none of {list(OPTIONAL_PARTS)}")
        return self

    @property
    def activation_peak(self) -> int:
        """Peak bytes of activations over all phases."""
        return max((phase.peak for phase in self.phases), default=0)

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Names of the components that run in each denoising step."""
        return tuple(component.name for component in self.components if component.role == "denoiser")

    @property
    def denoiser_phases(self) -> tuple[int, ...]:
        """Indices of the phases in which denoisers run."""
        names = set(self.denoisers)
        return tuple(place for place, phase in enumerate(self.phases) if names & {p.component for p in phase.calls})

    def with_variant(self, variant: Variant | None) -> Footprint:
        """Return a copy with the denoiser phases of `variant`, or self if it is None."""
        if variant is None:
            return self
        phases = list(self.phases)
        for place, phase in zip(self.denoiser_phases, variant.phases, strict=True):
            phases[place] = phase
        return self.model_copy(update={"phases": tuple(phases), "variants": ()})

    def merged_with(self, other: Footprint) -> Footprint:
        """Return a copy with the parts that only `other` has measured; self if `other` is of a different call."""
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
