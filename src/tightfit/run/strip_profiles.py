"""Autoencoder calls of a measured pipeline: recorded, and profiled in strips."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from tightfit.apply.activations.exporting import NotExported, without_weights
from tightfit.apply.activations.strips.called_program import program_of
from tightfit.apply.activations.strips.cost_estimate import profile_stages
from tightfit.apply.activations.strips.executor import StripConfig as Strips
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph
from tightfit.apply.activations.strips.op_costs import OpCostCache
from tightfit.apply.activations.strips.strip_plan import StripPlan
from tightfit.devices.choose import usable_cores
from tightfit.measure.forked_work import begin, both, in_parallel
from tightfit.measure.modules import find_layers, find_role
from tightfit.schema.footprint import STRIP_OPTIONS, FeatureMaps, Footprint, Phase, StripProfile, StripStageProfile

__all__ = ["AutoencoderStripProfiles", "StripOptionProfiler"]


T = TypeVar("T")

PAGES = 20 * 2**20  # bytes that an allocator may hold on top


class StripOptionProfiler:
    """Profiles of a call of an autoencoder's method in strips, one item of the batch at a time."""

    def __init__(self, module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare `module.method(*args, **kwargs)`. Raises UnsupportedGraph."""
        first, *others = args
        count = len(first)
        alone = lambda x: x[:1] if isinstance(x, torch.Tensor) and x.ndim and len(x) == count else x  # noqa: E731
        layers, form = tree_flatten(tree_map(alone, (tuple(others), kwargs)))  # as in a call: its cache key
        self._program, self.mark, _ = program_of(module, type(module), method, first[:1], layers, form)
        self._items, self._op_costs, self._layers = count, OpCostCache(), _layer_of_module(module)

    @property
    def operations(self) -> int:
        """Number of operations to run in strips."""
        return len(self._program.nodes)

    def profile(
        self, strip_bytes: int, maps: FeatureMaps, beside: int, outside: int, *, expandable: bool = True
    ) -> StripProfile | None:
        """Return the profile with `strip_bytes` for strips and kept `maps`; None if "host" would keep no map there.

        `beside` more bytes are allocated all along, and `outside` bytes before or after. With `expandable`, the
        allocator's segments are expandable.
        """
        strip_plan = Strips(self._program, strip_bytes, maps, self.mark).strip_plan
        if maps == "host" and not strip_plan.in_host:
            return None
        stages, (peak, allocator_bytes) = both(
            lambda: self._stages(strip_plan), lambda: strip_plan.peak_and_allocator_bytes(expandable=expandable)
        )
        made = (self._items - 1) * sum(self._program.nodes[index].bytes for index in self._program.outputs)
        needed = beside + made + max(allocator_bytes, strip_bytes)
        return StripProfile(
            strip_bytes=strip_bytes,
            feature_maps=maps,
            allocator_bytes=max(needed, outside) + PAGES,
            host_bytes=peak.host,
            batch_items=self._items,
            stages=stages,
        )

    def _stages(self, strip_plan: StripPlan) -> tuple[StripStageProfile, ...]:
        with self._op_costs.working():
            return tuple(profile_stages(strip_plan, self._op_costs, self._layers))


def _layer_of_module(module: nn.Module) -> dict[str, str]:
    """Map the path of each module to the path of the layer that it belongs to."""
    layers = {id(part): layer for layer, parts in find_layers(module).items() for part in parts}
    return {path: layers[id(part)] for path, part in module.named_modules() if id(part) in layers}


QUICK = 1000  # operations of autoencoder methods: those for images have at most this many, those for clips more


class AutoencoderStripProfiles:
    """First call of each autoencoder method: the module without weights, as it was then, and the argument shapes."""

    def __init__(self, components: Mapping[str, nn.Module], undo: ExitStack, *, expandable: bool) -> None:
        self._expandable = expandable
        self._seen: dict[tuple[str, str], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        self._profilers: dict[tuple[str, str], StripOptionProfiler | None] = {}
        self._ahead: dict[str, Callable[[], list[StripProfile | None]]] = {}  # of options that were not asked for yet
        for name, module in components.items():
            if find_role(name, module) == "autoencoder":
                for method in ("encode", "decode"):
                    if hasattr(module, method):
                        self._follow(name, module, method, undo)

    def _follow(self, name: str, module: nn.Module, method: str, undo: ExitStack) -> None:
        inner = getattr(module, method)
        first = next(iter(inspect.signature(inner).parameters))

        @functools.wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = args or (kwargs[first],)
            others = {key: value for key, value in kwargs.items() if args or key != first}
            if (name, method) not in self._seen:  # now, because some pipelines change its dtype for the call
                with contextlib.suppress(NotExported), torch.inference_mode(False):
                    double = without_weights(module, type(module).__mro__[1])
                    for own in ("forward", "encode", "decode"):  # without the wrappers of other observers
                        vars(double).pop(own, None)
                    self._seen[name, method] = double, *tree_map(_shape_of, (given, others))
            return inner(*args, **kwargs)

        setattr(module, method, run)
        undo.callback(delattr, module, method)

    def profilers(self) -> dict[tuple[str, str], StripOptionProfiler | None]:
        """Return the strip profiler of each method called, by (component, method); None if its graph is unsupported.

        Exported programs are cached.
        """
        return {kind: self._profiler(kind) for kind in self._seen}

    def with_strips(self, footprint: Footprint, option: str) -> Footprint:
        """Return `footprint` with the strip option of this name for autoencoders whose graphs are supported.

        If the graphs are small (QUICK), other missing strip options are added too: this is faster than to search for
        what else is missing. If they are large, an idle core begins with another option that may be asked for next, the
        one with most strips first: clips often need several.
        """
        profilers = [self._profiler_of(phase) for phase in footprint.phases]
        quick = sum(profiler.operations for profiler in profilers if profiler) <= QUICK
        missing = [each for each in footprint.not_measured if each in STRIP_OPTIONS]

        def profiles(option: str) -> list[StripProfile | None]:
            pairs = zip(footprint.phases, profilers, strict=True)
            return [self._profile(phase, profiler, option) for phase, profiler in pairs]

        jobs, measured = {each: functools.partial(profiles, each) for each in missing}, missing if quick else [option]
        if quick:
            found = _shared_out(list(jobs.values()))
        else:
            later = (each for each in reversed(missing) if each != option and each not in self._ahead)
            if (following := next(later, None)) is not None:
                self._ahead[following] = begin(jobs[following])
            found = [self._ahead.get(option, jobs[option])()]
        pairs = zip(footprint.phases, zip(*found, strict=True), strict=True)
        phases = tuple(phase.with_strip_options(filter(None, options)) for phase, options in pairs)
        left = tuple(each for each in footprint.not_measured if each not in measured)
        return footprint.model_copy(update={"phases": phases, "not_measured": left})

    def _profiler_of(self, phase: Phase) -> StripOptionProfiler | None:
        """Strip profiler of the phase's only kind of component call, if its graph is supported."""
        kinds = {(done.component, done.method) for done in phase.calls}
        if len(kinds) != 1 or not kinds <= self._seen.keys():
            return None
        return self._profiler(*kinds)

    def _profiler(self, kind: tuple[str, str]) -> StripOptionProfiler | None:
        if kind not in self._profilers:
            module, args, kwargs = self._seen[kind]
            try:
                self._profilers[kind] = StripOptionProfiler(module, kind[1], args, kwargs)
            except UnsupportedGraph:
                self._profilers[kind] = None
        return self._profilers[kind]

    def _profile(self, phase: Phase, profiler: StripOptionProfiler | None, option: str) -> StripProfile | None:
        if profiler is None:
            return None
        divisor, maps = STRIP_OPTIONS[option]
        beside, outside = phase.live_bytes_at_start, phase.peak_between_calls
        return profiler.profile(phase.strip_limit(divisor), maps, beside, outside, expandable=self._expandable)


def _shared_out(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of `jobs`, each of which is faster after others in the same process, from one per core."""
    count = min(usable_cores(), len(jobs))
    shares = in_parallel([functools.partial(_done, jobs[first::count]) for first in range(count)])
    return [shares[number % count][number // count] for number in range(len(jobs))]


def _done(jobs: Sequence[Callable[[], T]]) -> list[T]:
    return [job() for job in jobs]


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
