"""A measured call → the variants of its denoisers that need fewer bytes, each measured too."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import nn

from tightfit.apply.activations.ffn_chunking import chunk_feed_forwards, inside_feed_forwards
from tightfit.apply.activations.gradient_checkpointing import checkpoint_blocks
from tightfit.apply.activations.max_batch import chunk_blocks, in_chunks
from tightfit.measure.block_replay import BlockReplay
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.forked_work import both, in_parallel
from tightfit.measure.modules import find_layers, find_role
from tightfit.run.pass_replay import CallReplayer
from tightfit.run.simulate import Inputs, SimulationRun
from tightfit.schema.footprint import Footprint, Phase, Variant

__all__ = ["VariantSimulator", "measure_variants"]

Simulate = Callable[[Variant], tuple[Phase, ...]]  # returns the denoisers' phases under a variant
GAIN = 0.05  # of the allocator bytes of activations: the least that a variant must save
SHARES = (8, 32)  # a denoiser's peak over one of these is the limit of feed-forwards' inner activations
LEAST = 2**20  # bytes, the least such limit


def measure_variants(footprint: Footprint, simulate: Simulate) -> tuple[Variant, ...]:
    """Return the variants that save bytes; `simulate` simulates the call under a variant."""
    base_phases = tuple(footprint.phases[place] for place in footprint.denoiser_phases)
    if not base_phases:
        return ()
    if footprint.request is not None and footprint.request.backward is not None:
        again: list[dict[str, Any]] = [{"gradient_checkpointing": True}]
        return tuple(_finer(_max_allocator_bytes(base_phases), again, simulate))
    peak = max(phase.peak for phase in base_phases)
    sizes = sorted({max(peak // share, LEAST) for share in SHARES}, reverse=True)
    allocator_bytes = _max_allocator_bytes(base_phases)

    def finer(steps: list[dict[str, Any]]) -> Callable[[], list[Variant]]:
        return functools.partial(_finer, allocator_bytes, steps, simulate)

    chunked = finer([{"ffn_chunk": size} for size in sizes])
    parts, *smaller = _parts(footprint.request.batch if footprint.request else 1)
    by_blocks, whole, found = in_parallel([*map(finer, _steps(parts, sizes)), chunked])
    while whole:
        found += [*whole, *by_blocks]
        if not smaller:
            break
        by_blocks, whole = both(*map(finer, _steps(smaller.pop(0), sizes)))
    return tuple(found)


def _steps(parts: dict[str, Any], sizes: list[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ever finer variants that split a batch into `parts`: in each block, which takes longer to measure, or whole."""
    by_blocks = {**parts, "by_blocks": True}
    first, second = ([way, *({**way, "ffn_chunk": size} for size in sizes)] for way in (by_blocks, parts))
    return first, second


def _parts(batch: int) -> Iterator[dict[str, Any]]:
    """Ways to split a batch, largest parts first. Whether guidance doubles the batch is not known here."""
    if batch == 1:
        yield {"cfg": "sequential"}
        return
    while batch:
        yield {"max_batch": batch}
        batch //= 2


def _finer(allocator_bytes: int, steps: list[dict[str, Any]], simulate: Simulate) -> list[Variant]:
    """The first of `steps`, each finer than the one before, for as long as each saves GAIN of `allocator_bytes`."""
    found: list[Variant] = []
    with contextlib.suppress(Exception):  # an error here would occur on a card too: no variant
        for step in steps:
            variant = Variant(**step, phases=())
            variant = variant.model_copy(update={"phases": simulate(variant)})
            needed = _max_allocator_bytes(variant.phases)
            if needed > (1 - GAIN) * allocator_bytes:
                break
            found.append(variant)
            allocator_bytes = needed
    return found


def _max_allocator_bytes(phases: tuple[Phase, ...]) -> int:
    return max((phase.allocator_bytes for phase in phases), default=0)


class VariantSimulator:
    """Repeats the next simulated call of `simulation` under variants of its denoisers.

    Encoders replay their outputs of the first call, and a repeated call ends after the denoisers.
    """

    def __init__(self, simulation: SimulationRun, unable: Collection[tuple[str, str]]) -> None:
        """`unable`: components and methods that cannot run on shapes, and whose batch is not split."""
        self._simulation, self._apart = simulation, {name for name, method in unable if method == "forward"}
        self._encoders, self._autoencoders = [], []
        # never undone: `simulation` has no other user
        self.replay = BlockReplay(simulation.components, simulation.card, ExitStack())
        for name, module in simulation.components.items():
            role = find_role(name, module)
            if role == "encoder":
                module.forward = CallReplayer(module)
                self._encoders.append(module.forward)
            elif role == "autoencoder":
                self._autoencoders.append((module, {path: tensor.dtype for path, tensor in _named(module)}))

    def phases(self, variant: Variant, inputs: Inputs, before: CallProfiler) -> tuple[Phase, ...]:
        """Return the denoisers' phases under `variant`; `before` followed the call without a variant."""
        for module, dtypes in self._autoencoders:  # some pipelines change their dtypes during a call
            for path, tensor in _named(module):
                if tensor.dtype != dtypes[path]:
                    tensor.data = tensor.data.to(dtypes[path])
        gc.collect()  # garbage of the last call
        self._simulation.card.allocator.empty_cache()
        with ExitStack() as undo:
            self._vary(variant, undo)
            profiler = before.for_another_call(self._simulation.components, rough=True)
            if variant.ffn_chunk is not None:
                profiler.chunked = self._feed_forwards
            profiler.follow(self._simulation.components, undo, self._simulation.differentiated)
            self.replay.listen(profiler)
            with contextlib.suppress(_Denoised):
                self._simulation.run(inputs)
            denoisers = self._simulation.denoisers.keys()
            return tuple(phase for phase in profiler.phases() if denoisers & {done.component for done in phase.calls})

    @functools.cached_property
    def _feed_forwards(self) -> dict[str, dict[str, str]]:
        """Of each denoiser, the layers inside feed-forwards, each with the path of its feed-forward."""
        found = {}
        for name in self._simulation.denoisers:
            network = self._simulation.components[name]
            paths = {id(module): path for path, module in network.named_modules()}
            inside = {part: paths[id(module)] for part, module in inside_feed_forwards(network).items()}
            layers = find_layers(network).items()
            found[name] = {path: inside[id(part)] for path, parts in layers for part in parts if id(part) in inside}
        return found

    def _vary(self, variant: Variant, undo: ExitStack) -> None:
        for encoder in self._encoders:
            encoder.again()
        for module, _ in self._autoencoders:
            if hasattr(module, "decode"):
                vars(module)["decode"] = _ended
                undo.callback(vars(module).pop, "decode", None)
        for name, replayer in self._simulation.denoisers.items():
            module = self._simulation.components[name]
            if variant.gradient_checkpointing:
                checkpoint_blocks(module, contextlib.nullcontext, undo.callback, saves=True)
            if variant.ffn_chunk is not None:
                chunk_feed_forwards(module, variant.ffn_chunk, undo)
            if variant.by_blocks:
                chunk_blocks(module, variant.max_batch, undo)
            elif variant.splits_batch and name not in self._apart:
                replayer.vary(functools.partial(_in_parts, module, variant.max_batch), undo)
            if variant.ffn_chunk is None:  # else the first call tests the chunks; tables were built before
                replayer.watch(1, undo)


class _Denoised(Exception):
    """Raised when all denoisers are done, to end the call."""


def _ended(*args: Any, **kwargs: Any) -> Any:
    raise _Denoised


def _named(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return chain(module.named_parameters(), module.named_buffers())


def _in_parts(network: nn.Module, size: int | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, the forward of `network`, on `size` items of a batch at a time (None: half of it)."""
    return functools.partial(in_chunks(lambda _, *args, **kwargs: forward(*args, **kwargs), size), network)
