"""Step caches: what a denoiser keeps from one step to the next, to leave out work. Does not import torch.

`STRATEGIES` is the registry: what a plan may name. Each strategy is a choice of three parts: what is reused (`reuses`),
how it is predicted from what was kept (`predicts`), and when (`decides`). How each works is in
apply/activations/caches/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import BeforeValidator, model_validator

from tightfit.errors import PlanError, unknown_name
from tightfit.schema.base import Count, Positive, Real, Record
from tightfit.units import format_bytes

__all__ = [
    "STRATEGIES",
    "CacheLike",
    "CacheTrace",
    "Decides",
    "NamedCache",
    "Predicts",
    "Reuses",
    "StepCache",
    "StrategyKind",
]

Reuses = Literal["blocks", "network", "attention", "prompt"]
Predicts = Literal["as it was", "taylor", "last change", "linear in time"]
Decides = Literal[
    "first blocks", "modulated input", "filtered input", "output rate", "magnitudes", "interval", "always"
]


@dataclass(frozen=True)
class StrategyKind:
    """A strategy: its parts, its source, and the values that its fields have unless a plan says otherwise."""

    reuses: Reuses
    decides: Decides
    source: str
    predicts: Predicts = "as it was"
    residual: bool = True  # blocks: what they added is reused; else their output
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lossless: bool = False

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields that mean something for it."""
        common = {"strategy"} | (set() if self.lossless else {"keep_on", "warm_up", "cool_down", "skipped_steps"})
        own = {
            "first blocks": {"threshold", "most_skipped"},
            "modulated input": {"threshold", "most_skipped", "coefficients"},
            "filtered input": {"threshold", "most_skipped", "filters", "exponent"},
            "output rate": {"threshold", "most_skipped"},
            "magnitudes": {"threshold", "most_skipped", "magnitudes"},
            "interval": {"interval"},
            "always": set[str](),
        }[self.decides]
        blocks = {"first_blocks", "last_blocks"} if self.reuses == "blocks" else set()
        attention = {"cross_interval"} if self.reuses == "attention" and self.predicts == "as it was" else set()
        predicting = {
            "taylor": {"order"},
            "last change": {"weight", "guidance_interval", "low_frequencies", "high_frequencies"},
        }.get(self.predicts, set())
        return frozenset(common | own | blocks | attention | predicting)


STRATEGIES: Mapping[str, StrategyKind] = {
    "static": StrategyKind(
        "blocks", "interval", "DeepCache, arXiv:2312.00858", defaults={"interval": 2, "warm_up": 1, "cool_down": 1}
    ),
    "first-block": StrategyKind(
        "blocks", "first blocks", "ParaAttention's First Block Cache, after TeaCache", defaults={"threshold": 0.05}
    ),
    "dual-block": StrategyKind(
        "blocks", "first blocks", "cache-dit's DBCache",
        defaults={"threshold": 0.08, "first_blocks": 8, "warm_up": 8},
    ),
    "teacache": StrategyKind(
        "blocks", "modulated input", "TeaCache, arXiv:2411.19108",
        defaults={"threshold": 0.2, "warm_up": 1, "cool_down": 1},
    ),
    "sea-cache": StrategyKind(
        "blocks", "filtered input", "SeaCache, arXiv:2602.18993", "taylor",
        defaults={"threshold": 0.2, "filters": "tokens", "order": 0, "warm_up": 1, "cool_down": 1},
    ),
    "magcache": StrategyKind(
        "blocks", "magnitudes", "MagCache, arXiv:2506.09045",
        defaults={"threshold": 0.06, "most_skipped": 3, "first_blocks": 0},
    ),
    "taylorseer": StrategyKind(
        "blocks", "interval", "TaylorSeer, arXiv:2503.06923", "taylor",
        defaults={"interval": 5, "order": 1, "warm_up": 3},
    ),
    "taylorseer-lite": StrategyKind(
        "network", "interval", "TaylorSeer as diffusers' use_lite_mode has it", "taylor", residual=False,
        defaults={"interval": 5, "order": 1, "warm_up": 3},
    ),
    "blockdance": StrategyKind(
        "blocks", "interval", "BlockDance, arXiv:2503.15927", residual=False,
        defaults={"interval": 2, "first_blocks": 0, "last_blocks": 8, "warm_up": 10, "cool_down": 2},
    ),
    "easycache": StrategyKind(
        "network", "output rate", "EasyCache, arXiv:2507.02860",
        defaults={"threshold": 0.05, "warm_up": 5, "cool_down": 1},
    ),
    "meancache": StrategyKind(
        "network", "interval", "MeanCache, arXiv:2601.19961", "linear in time", residual=False,
        defaults={"interval": 2, "warm_up": 2, "cool_down": 1},
    ),
    "pab": StrategyKind(
        "attention", "interval", "Pyramid Attention Broadcast, arXiv:2408.12588", residual=False,
        defaults={"interval": 2, "cross_interval": 3, "warm_up": 2, "cool_down": 1},
    ),
    "faster-cache": StrategyKind(
        "attention", "interval", "FasterCache, arXiv:2410.19355", "last change", residual=False,
        defaults={
            "interval": 2, "guidance_interval": 5, "low_frequencies": 1.1, "high_frequencies": 1.1, "warm_up": 15,
        },
    ),
    "text-kv": StrategyKind(
        "prompt", "always", "layers that see nothing but the prompt give the same in every step", residual=False,
        lossless=True,
    ),
}  # fmt: skip
if TYPE_CHECKING:  # which cannot make a Literal of a registry
    Strategy: TypeAlias = str
else:

    def _known(name: object) -> object:
        if isinstance(name, str) and name not in STRATEGIES:
            raise PlanError(unknown_name("step cache", name, STRATEGIES), field="strategy")
        return name

    Strategy = Annotated[Literal[tuple(STRATEGIES)], BeforeValidator(_known)]
_FALLBACK: Mapping[str, Any] = {"first_blocks": 1, "last_blocks": 0, "warm_up": 0, "cool_down": 0}


class StepCache(Record):
    """A strategy, and its settings: None is the strategy's own value, as `STRATEGIES` has it.

    Steps are counted from 0, as the pipeline's denoising loop takes them. The first step always runs.
    """

    strategy: Strategy
    threshold: Real | None = None  # change up to which a step is skipped; what is compared depends on the strategy
    interval: Positive | None = None  # every how many steps all of the denoiser runs
    cross_interval: Positive | None = None  # the same for attention to the prompt
    guidance_interval: Positive | None = None  # every how many steps the unconditional prediction is computed
    weight: Real | None = None  # of the last change of an attention's output; None: grows from 0 to 1 over the steps
    low_frequencies: Real | None = None  # by what guidance's low frequencies grow in each step that leaves it out …
    high_frequencies: Real | None = None  # … and its high ones
    order: Count | None = None  # of the Taylor series
    first_blocks: Count | None = None  # blocks at the beginning that always run
    last_blocks: Count | None = None  # blocks at the end that always run
    warm_up: Count | None = None  # steps at the beginning that always run
    cool_down: Count | None = None  # steps at the end that always run
    most_skipped: Positive | None = None  # steps in a row that may be skipped; None: any number
    filters: Literal["tokens", "latents"] | None = None  # what is compared after a filter that removes noise
    exponent: Real | None = None  # of the frequency by which pictures' power falls; None: 2, for clips 3
    coefficients: tuple[float, ...] | None = None  # of a polynomial of the change, highest power first; None: 1, 0

    magnitudes: tuple[Real, ...] | None = None  # of what blocks add in each step, relative to the step before
    skipped_steps: tuple[Count, ...] | None = None  # these steps are skipped, and no others
    keep_on: Literal["device", "host"] = "device"  # where what is kept waits until it is reused

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kind = self.kind
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        if without := sorted(given - kind.fields - {"strategy"}):
            allowed = ", ".join(sorted(kind.fields - {"strategy"})) or "no other field"
            raise PlanError(
                f"{without[0]}={getattr(self, without[0])} means nothing for strategy={self.strategy}, "
                f"which takes {allowed}",
                field=without[0],
            )
        if kind.decides == "magnitudes" and self.magnitudes is None and self.skipped_steps is None:
            raise PlanError(
                f"strategy={self.strategy} needs magnitudes, one for each step, which differ by model: "
                "diffusers' MagCacheConfig(calibrate=True) measures them",
                field="magnitudes",
            )
        if self.skipped_steps is not None and 0 in self.skipped_steps:
            raise PlanError(
                f"skipped_steps={list(self.skipped_steps)}: step 0 has nothing to reuse, and cannot be skipped"
            )
        return self

    @classmethod
    def of(cls, said: StepCache | Mapping[str, Any] | str) -> StepCache:
        """Return the step cache that `said` describes: fields, or text: "first-block", "first-block,threshold=0.1"."""
        if isinstance(said, StepCache):
            return said
        if not isinstance(said, str):
            return cls.from_mapping(said)
        strategy, *fields = said.split(",")
        pairs = [field.partition("=") for field in fields]
        if any(not value for _, _, value in pairs):
            raise PlanError(f"cache={said!r:.60} is not STRATEGY,FIELD=VALUE, e.g. first-block,threshold=0.1")
        try:
            given = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
        except (yaml.YAMLError, ValueError, RecursionError):
            raise PlanError(f"cache={said!r:.60}: a value is not YAML, e.g. first-block,threshold=0.1") from None
        return cls.from_mapping({"strategy": strategy.strip()} | given)

    @property
    def kind(self) -> StrategyKind:
        return STRATEGIES[self.strategy]

    @property
    def lossless(self) -> bool:
        return self.kind.lossless

    @property
    def by_values(self) -> bool:
        """Whether it depends on values of tensors which steps are skipped."""
        compares = ("first blocks", "modulated input", "filtered input", "output rate")
        return self.kind.decides in compares and self.skipped_steps is None

    @property
    def decides_in_blocks(self) -> bool:
        """Whether it is decided by what the first blocks do, or their first attention is given."""
        if self.kind.decides == "filtered input":
            return bool(self.value("filters") == "tokens")
        return self.kind.decides in ("first blocks", "modulated input")

    def lossy(self, name: str) -> list[str]:
        """Return what may change the numbers of the component `name`, named by its technique."""
        return [] if self.lossless else [f"step-cache: {self.strategy} in {name}"]

    def value(self, name: str) -> Any:
        """Return the value of the field `name`, with the strategy's own in place of None."""
        own = getattr(self, name)
        return self.kind.defaults.get(name, _FALLBACK.get(name)) if own is None else own

    @property
    def described(self) -> str:
        """The strategy and its settings, on one line."""
        said = [f"{name}={getattr(self, name)}" for name in type(self).model_fields if self._says(name)]
        return f"step cache {self.strategy}" + (f" ({', '.join(said)})" if said else "")

    @property
    def brief(self) -> str:
        """The strategy and its settings, as text that `of` takes; lists of numbers are left out."""
        said = [name for name in type(self).model_fields if self._says(name)]
        values = {name: getattr(self, name) for name in said}
        return ",".join([self.strategy, *(f"{n}={v}" for n, v in values.items() if not isinstance(v, tuple))])

    def _says(self, name: str) -> bool:
        return name != "strategy" and getattr(self, name) not in (None, type(self).model_fields[name].default)


def _of_text(said: object) -> object:
    return StepCache.of(said) if isinstance(said, str) else said


NamedCache: TypeAlias = Annotated[StepCache, BeforeValidator(_of_text)]  # as a plan's field: also as text
CacheLike: TypeAlias = StepCache | Mapping[str, Any] | str | None  # as users may say it; None: no step cache


class CacheTrace(Record):
    """What a component's step cache kept in a call, and which steps it skipped."""

    component: str
    strategy: str
    steps: Count  # number of denoising steps that it saw
    skipped_steps: tuple[Count, ...] = ()  # in which it left something out, counted from 0
    device_bytes: Count = 0  # most bytes that it kept on the device between steps
    host_bytes: Count = 0  # most bytes that it kept in host memory
    loaded_in_vain: Count = 0  # bytes of weights that were on their way when it was decided not to run their layers

    @property
    def described(self) -> str:
        """What it skipped and kept, as a sentence."""
        skipped = ", ".join(map(str, self.skipped_steps))
        text = f"{self.component} with {self.strategy}: {len(self.skipped_steps)} of {self.steps} steps skipped"
        text += f" ({skipped})" if skipped else ""
        text += f", {self.kept}" if self.kept else ""
        return text + (f", {format_bytes(self.loaded_in_vain)} loaded in vain" if self.loaded_in_vain else "")

    @property
    def kept(self) -> str:
        """What it kept, as text; "" for nothing."""
        device = f"{format_bytes(self.device_bytes)} kept on the device" if self.device_bytes else ""
        host = f"{format_bytes(self.host_bytes)} {'' if device else 'kept '}in host memory" if self.host_bytes else ""
        return ", ".join(filter(None, (device, host)))
