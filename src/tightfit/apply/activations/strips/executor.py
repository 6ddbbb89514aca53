"""An autoencoder's encode or decode in strips of rows, with the same numbers; in fewer rows when memory runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from tightfit.apply.activations.strips.called_program import Rebuild, program_of
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph
from tightfit.apply.activations.strips.graph_cache import kept_strip_plan
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.program_inputs import LiveWeights, rewinder
from tightfit.apply.activations.strips.runner import Runner
from tightfit.apply.activations.strips.strip_plan import StripPlan
from tightfit.apply.latest_used import LatestUsed
from tightfit.apply.output_replay import without_frames
from tightfit.devices.device import Device
from tightfit.devices.memory import is_out_of_memory
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.measure.recorder import Recorder
from tightfit.schema.footprint import FeatureMaps
from tightfit.units import format_bytes

__all__ = ["NeedsWholeBatch", "StripConfig", "StripExecutor"]


LESS = 0.98  # of the bytes on the device; a retry has to take less than that


@dataclass(frozen=True)
class StripConfig:
    """A limit of `strip_bytes` for strips, and where feature maps are kept; `mark` is the program's cache key."""

    program: Program
    strip_bytes: int
    maps: FeatureMaps
    mark: str = ""

    @cached_property
    def strip_plan(self) -> StripPlan:
        return kept_strip_plan(self.mark, self.program, self.strip_bytes, self.maps)

    def described(self, planned: StripConfig) -> str:
        """How it differs from `planned`, as text."""
        said = [] if self.maps == planned.maps else ["maps in host memory"]
        if self.strip_bytes != planned.strip_bytes:
            said.append(
                f"strips within {format_bytes(self.strip_bytes)} instead of {format_bytes(planned.strip_bytes)}"
            )
        return ", ".join(said)

    def narrower(self, planned: StripConfig, *, separate: bool) -> StripConfig | None:
        """Return the next configuration that takes less device memory; None if there is none.

        The byte limit is halved as long as that helps. Then feature maps go to host memory, if that is `separate`, with
        the limit that was `planned`, halved until the configuration takes less.
        """
        half = max(min(self.strip_bytes, self.strip_plan.peak.device) // 2, 1)
        found = self._below(half, self.maps)
        if found is None and separate and self.maps != "host":
            found = self._below(planned.strip_bytes, "host")
        return found

    def _below(self, working: int, maps: FeatureMaps) -> StripConfig | None:
        """Return one with `working` bytes, halved until it takes less than this one; None if it never does."""
        way, smallest = replace(self, strip_bytes=working, maps=maps), replace(self, strip_bytes=1, maps=maps)
        while not self._takes_more_than(way):
            if not self._takes_more_than(smallest):
                return None
            working = max(working // 2, 1)
            way = replace(way, strip_bytes=working)
        return way

    def _takes_more_than(self, other: StripConfig) -> bool:
        return other.strip_plan.peak.device < LESS * self.strip_plan.peak.device


class NeedsWholeBatch(Exception):
    """A method was called with one item of a batch, but needs the whole batch."""


@dataclass
class _Prepared:
    """How calls with inputs of certain shapes run, and how their outputs are rebuilt."""

    planned: StripConfig
    way: StripConfig  # narrower than planned after running out of memory
    weights: LiveWeights
    rebuild: Rebuild


class StripExecutor:
    """Run methods of one autoencoder with at most `working` bytes for strips, besides feature maps kept between stages.

    `kind` is the module's class before it was fitted. Calls that cannot run in strips go to `otherwise`, and the
    recorder notes why. If the device runs out of memory, the call is retried with less.
    """

    def __init__(
        self, kind: type[nn.Module], working: int, maps: FeatureMaps, device: Device, recorder: Recorder
    ) -> None:
        self._kind, self._working, self._maps = kind, working, maps
        self._device, self._recorder = device, recorder
        self._host_pool: ActivationHostPool | None = None  # made when maps are first kept in host memory
        self._known = LatestUsed[Any, _Prepared | str]()  # or the reason why not, by method and arguments

    def bound(
        self, module: nn.Module, method: str, otherwise: Callable[..., Any], *, alone: bool = True
    ) -> Callable[..., Any]:
        """Return `module`'s method in strips; calls with gradients, under autocast or not supported go to `otherwise`.

        With `alone=False`, inputs are one item of a batch. Then NeedsWholeBatch is raised, before anything is computed,
        if the call cannot run in strips or draws noise (which must be drawn once for the whole batch).
        """

        def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            learning = torch.is_grad_enabled() or torch.is_autocast_enabled(first.device.type)
            prepared = None if learning else self._prepare(module, method, first, args, kwargs)
            if not alone and (not isinstance(prepared, _Prepared) or prepared.planned.program.draws_noise):
                raise NeedsWholeBatch
            if isinstance(prepared, _Prepared):
                inputs = [first, *_tensors(tree_flatten((args, kwargs))[0])]
                outputs = self._run(prepared, inputs)
                if prepared.way is not prepared.planned:
                    less = prepared.way.described(prepared.planned)
                    self._recorder.note(f"{method}: {less}, because the device ran out of memory")
                return prepared.rebuild(outputs)
            if prepared is not None:
                self._recorder.note(f"{method} runs whole: {prepared}")
            return otherwise(first, *args, **kwargs)

        return run

    def close(self) -> None:
        """Free the host memory of its feature maps."""
        if self._host_pool is not None:
            self._host_pool.close()

    def _run(self, prepared: _Prepared, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs; out of memory, retry with narrower configurations and remember the one that succeeds."""
        way, rewind = prepared.way, rewinder(prepared.planned.program, self._device)
        handled = sys.exception()  # the exception that the caller handles, if any
        while True:
            try:
                outputs = self._run_once(way, prepared.weights, inputs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = without_frames(error, handled)
            else:
                prepared.way = way
                return outputs
            less = None if rewind is None else way.narrower(prepared.planned, separate=self._device.separate)
            if rewind is None or less is None:
                raise failure
            rewind()
            self._device.release_cache()
            way = less

    def _run_once(self, way: StripConfig, weights: LiveWeights, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        strip_plan = way.strip_plan
        if self._host_pool is None and way.maps == "host" and self._device.separate:
            self._host_pool = ActivationHostPool(self._device)
        runner = Runner(strip_plan.graph, strip_plan.in_host, self._host_pool, weights, self._recorder)
        return runner.run(inputs, strip_plan.passes)

    def _prepare(self, module: nn.Module, method: str, first: torch.Tensor, args: Any, kwargs: Any) -> _Prepared | str:
        leaves, form = tree_flatten((args, kwargs))
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in (first, *leaves))
        key = method, str(form), shapes
        prepared = self._known.get(key)
        if prepared is None:
            try:
                with self._recorder.uncounted():
                    prepared = self._take_apart(module, method, first, leaves, form)
            except UnsupportedGraph as reason:
                prepared = str(reason)
            self._known[key] = prepared
        return prepared

    def _take_apart(
        self, module: nn.Module, method: str, first: torch.Tensor, leaves: list[Any], form: Any
    ) -> _Prepared:
        program, mark, rebuild = program_of(module, self._kind, method, first, leaves, form)
        planned = StripConfig(program, self._working, self._maps, mark)
        return _Prepared(planned, planned, LiveWeights(module, program), rebuild)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
