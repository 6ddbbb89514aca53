"""What is decided about one component, and about how autoencoders work: parts of a Plan, and their words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from tightfit.errors import PlanError, unknown_name
from tightfit.footprint import Count, Maps, Positive, Real
from tightfit.record import Record
from tightfit.units import format_bytes, parse_bytes

__all__ = [
    "TECHNIQUES",
    "Attention",
    "ComponentPlan",
    "Grain",
    "Guidance",
    "Home",
    "Maps",
    "PhaseForecast",
    "Placement",
    "Reason",
    "Size",
    "Stint",
    "Storage",
    "VaePlan",
    "check_techniques",
]

Placement = Literal["resident", "per-phase", "per-unit"]
Home = Literal["host", "disk"]
Grain = Literal["block", "leaf"]
Storage = Literal["as-loaded", "float8_e4m3fn", "float8_e5m2", "int8"]
Attention = Literal["auto", "torch", "flash", "efficient", "cudnn", "math", "xformers", "sage", "chunked"]
Guidance = Literal["together", "apart"]
ComputeDtype = Literal["float32", "float16", "bfloat16"]


def _whole_bytes(size: object) -> object:
    """Words and whole floats (8e9) as the integer they stand for; anything else as it is, to be refused."""
    if isinstance(size, str):
        return parse_bytes(size)
    return int(size) if isinstance(size, float) and size.is_integer() else size


Size = Annotated[Positive, BeforeValidator(_whole_bytes)]
Layout = Annotated[bool | None, BeforeValidator(lambda said: None if said == "auto" else said)]
# the lossy techniques, by the names under which a user allows them
TECHNIQUES: Mapping[str, str] = {
    "fp8": "weights stored in eight bits, widened for each use",
    "int8": "matrices of linear layers stored as eight-bit integers, by torchao",
    "sage-attention": "attention with queries and keys rounded to eight bits, by SageAttention",
    "blended-tiling": "autoencoder tiles decoded on their own and blended where they overlap",
}


class Reason(Record):
    decision: str
    because: str


class PhaseForecast(Record):
    """What a phase will be like."""

    name: str
    seconds: Real
    peak_bytes: Count  # that an allocator takes of the device
    elsewhere: dict[str, Count] = Field(default_factory=dict)  # and of the plan's other devices, by name


class Stint(Record):
    """A component at work, some times in a row."""

    component: str
    method: str = "forward"
    runs: Positive = 1
    unused: tuple[str, ...] = ()  # parts of the component that have no work then, with all that is inside
    early: Count | None = None  # bytes of it that come while who works before ends; None: as many as find room


class VaePlan(Record):
    """How autoencoders work through their pictures, in both directions."""

    slicing: bool = False  # one item of a batch at a time
    strips: Size | None = None  # exact tiling: bytes for strips of rows, beside the maps that are kept between them
    maps: Maps = "device"  # where those wait; "again": no more than fit into as many bytes, the rest is computed again
    tile: Annotated[int, Strict(), Field(ge=16)] | None = None  # side in pixels; None: whole pictures
    overlap: Annotated[float, Strict(), Field(ge=0, le=0.5)] = 0.25  # share of a tile shared with the next

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.strips is None and self.maps != "device":
            raise PlanError(f"vae.maps={self.maps} needs vae.strips too, e.g. vae.strips=256MB", maps=self.maps)
        if self.tile is None and "overlap" in self.model_fields_set and self.overlap != 0.25:
            raise PlanError(
                f"vae.overlap={self.overlap} needs a tile size too, e.g. vae.tile=512", overlap=self.overlap
            )
        return self

    @property
    def cuts(self) -> bool:
        """Whether anything is worked through in parts."""
        return self.slicing or self.strips is not None or self.tile is not None

    @property
    def described(self) -> str:
        """How pictures are worked through, on one line."""
        cut = f"tiles of {self.tile} px" if self.tile else "whole pictures"
        if self.strips is not None:
            wait = {"device": "on the device", "host": "in host memory", "again": "as far as they fit"}[self.maps]
            cut = f"exact strips within {format_bytes(self.strips)}, maps kept {wait}"
            cut += f", where that cannot be in tiles of {self.tile} px" if self.tile else ""
        return f"{cut}, one item at a time" if self.slicing or self.strips is not None else cut


class ComponentPlan(Record):
    """Where one component's weights live and in what form.

    Of what is placed per unit, `stays` is brought once for as long as the component works, and the rest passes
    through a ring of `ring` bytes on the device, again for each use. Whoever gives `weights` alone leaves the two
    to the planner.
    """

    device: str | None = None  # on which it computes; None: on the plan's
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
    channels_last: Layout = False  # of convolutions' weights; None, or "auto": where that was measured to be faster
    batch: Positive | None = None  # items that work at a time, at most; None: all that there are
    guidance: Guidance | None = None  # a step's two predictions in one pass, or each in its own; None: as the pipeline
    feed_forward: Size | None = None  # bytes for the inner maps of feed-forwards; None: of all tokens at once
    traced: str | None = None  # the file of an exported network, which works in place of this one's code
    compiled: bool = False  # that network as machine code
    attention: Attention = "auto"  # by whom; "auto": torch, and where it would make all scores at once, in chunks

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.storage == "as-loaded":
            for field in ("skip", "compute_dtype"):
                if getattr(self, field) is not None:
                    raise PlanError(f"{field} needs storage=float8_e4m3fn, float8_e5m2 or int8", field=field)
        if self.guidance == "apart" and self.batch is not None:
            raise PlanError(f"guidance=apart halves each batch, batch={self.batch} says how many: leave one out")
        if self.traced is not None and (self.feed_forward or self.attention != "auto"):
            raise PlanError(f"the parts of traced={self.traced} are fixed: leave feed_forward and attention out")
        if self.compiled and (self.traced is None or self.storage != "as-loaded" or self.placement == "per-unit"):
            raise PlanError(
                "compiled needs traced=FILE and weights that are there together, as loaded: here are "
                f"traced={self.traced}, storage={self.storage}, placement={self.placement}",
                field="compiled",
            )
        if self.placement != "per-unit":
            for field in ("weights", "grain", "ring", "stays"):
                if getattr(self, field) is not None:
                    raise PlanError(f"{field} only means something with placement=per-unit", field=field)
        return self

    @property
    def technique(self) -> str | None:
        """The lossy technique by which it is stored."""
        return None if self.storage == "as-loaded" else "int8" if self.storage == "int8" else "fp8"

    def lossy(self, name: str) -> list[str]:
        """What may change the numbers of the component `name`, each named by its technique."""
        stored = [f"{self.technique}: {name} is stored in {self.storage}"] if self.technique else []
        return stored + ([f"sage-attention: {name} attends in eight bits"] if self.attention == "sage" else [])

    @property
    def described(self) -> str:
        """All that differs from the usual, on one line."""
        said = [f"on {self.device}"] if self.device else []
        said += [self.placement] + (["from disk"] if self.home == "disk" else [])
        if self.ring is not None and self.stays is not None:
            said += [f"by {self.grain}", f"{len(self.stays)} stay", f"ring of {format_bytes(self.ring)}"]
        said += ["page-locked"] if self.pinned else []
        said += [] if self.storage == "as-loaded" else [f"stored as {self.storage}"]
        said += ["channels-last"] if self.channels_last else []
        said += [f"at most {self.batch} items at a time"] if self.batch else []
        said += [f"guidance {self.guidance}"] if self.guidance else []
        said += [f"feed-forward within {format_bytes(self.feed_forward)}"] if self.feed_forward else []
        said += [f"{'compiled, ' * self.compiled}as exported in {self.traced}"] if self.traced else []
        return ", ".join(said if self.attention == "auto" else [*said, f"attention by {self.attention}"])


def check_techniques(names: Iterable[str]) -> tuple[str, ...]:
    """`names`, if all are lossy techniques; PlanError with the nearest name if one is not."""
    if isinstance(names, str):
        names = (names,)
    chosen = tuple(names)
    for name in chosen:
        if name not in TECHNIQUES:
            raise PlanError(unknown_name("technique", str(name), TECHNIQUES), name=str(name))
    return chosen
