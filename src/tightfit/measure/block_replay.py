"""Equivalent blocks on a simulated card: one of them runs, and its effects on the card are replayed for the others.

On shapes alone, a block's allocator calls and kernels depend only on its layers and on the layouts of its inputs. So
the first of its kind is recorded in each call of a network, and replayed for all equivalent ones: for the allocator,
the clock and the kernel watchers. Blocks that wait for values, copy over the link, or hold or free other memory run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.measure.block_events import Allocated, BlockEvent, Freed, Ran, block_events
from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.module_equivalence import (
    COMPARABLE,
    REPEATS,
    ModuleEquivalence,
    input_layouts,
    is_simulated,
)
from tightfit.measure.modules import find_layers, find_role
from tightfit.measure.passes import OpenCall
from tightfit.simulator.blocks import Block
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.storage import ViewSpec, free_dead_tensors, store_of, tensors_in, view

__all__ = ["BlockReplay"]

TRIALS = 3  # recordings per kind of block in a call: the first may allocate cuBLAS's workspace, which is kept


class _Place(NamedTuple):
    """A block's path in its component, and its layers by relative path, which are equal for equivalent blocks."""

    path: str
    layers: tuple[str, ...]  # as `relative` returns them

    def relative(self, layer: str) -> str | None:
        """Return ":" and the path of `layer` relative to the block; "" for no layer, None for one outside."""
        if layer and layer != self.path and not layer.startswith(f"{self.path}."):
            return None
        return layer and f":{layer[len(self.path) :]}"

    def layer(self, relative: str) -> str:
        """Return the full path of a layer that `relative` returned."""
        return relative and f"{self.path}{relative[1:]}"


class _Kernel(NamedTuple):
    position: int  # index in the allocator's history
    work: KernelCost
    layer: str  # current layer


class _InputOutput(NamedTuple):
    """An output that is an input, or a view of it."""

    place: int
    look: ViewSpec | None  # None: the input itself


class _OwnOutput(NamedTuple):
    """An output in memory that the block allocated."""

    place: int  # index among the kept allocations
    look: int  # index among the views of that allocation


class _Done(NamedTuple):
    """The recorded effects of one block."""

    events: tuple[BlockEvent, ...]
    layer: str  # current layer afterwards, relative path
    module_calls: int  # since its last kernel
    kept: tuple[tuple[int, int, tuple[ViewSpec, ...]], ...]  # memory of outputs: allocation number, bytes, its views
    outputs: tuple[Any, ...]  # leaves of the output: _InputOutput, _OwnOutput, or plain values
    structure: TreeSpec


class BlockReplay:
    """Runs each kind of block of `components` once per call on `card` and replays the others, except autoencoders."""

    def __init__(self, components: Mapping[str, nn.Module], card: SimulatedCard, undo: ExitStack) -> None:
        self._card = card
        self._profiler: CallProfiler | None = None
        self._kernels: list[_Kernel] = []  # since the outermost block being recorded began
        self._noting = self._waits = 0
        self._pass: OpenCall | None = None
        self._known: dict[Any, _Done | int] = {}  # of the call, by kind: recording, or failed attempts
        self._equivalence = ModuleEquivalence()
        card.kernel_callbacks.append(self._note)
        undo.callback(card.kernel_callbacks.remove, self._note)
        card.sync_callbacks.append(self._wait)
        undo.callback(card.sync_callbacks.remove, self._wait)
        for name, module in components.items():
            if find_role(name, module) != "autoencoder":
                layers = find_layers(module)
                for path, block in _blocks(module):
                    bare = _Place(path, ())
                    within = tuple(relative for layer in layers if (relative := bare.relative(layer)) is not None)
                    self._follow(name, _Place(path, within), block, undo)

    def listen(self, ledger: CallProfiler) -> None:
        """Use `ledger` from now on to find the component call in progress."""
        self._profiler, self._pass = ledger, None

    def _follow(self, name: str, place: _Place, block: nn.Module, undo: ExitStack) -> None:
        if "forward" in vars(block):
            return

        @functools.wraps(block.forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            usual = functools.partial(type(block).forward, block)  # looked up late, as variants change the class
            opened = self._profiler.at_work if self._profiler else None
            if opened is None or opened.component != name or torch.is_grad_enabled():
                return usual(*args, **kwargs)
            if opened is not self._pass:
                self._pass, self._known, self._equivalence = opened, {}, ModuleEquivalence()
            given, structure = tree_flatten((args, kwargs))
            layouts = input_layouts(given)
            if layouts is None:
                return usual(*args, **kwargs)
            kind = self._equivalence.of(block), place.layers, structure, layouts
            known = self._known.get(kind, 0)
            if isinstance(known, _Done):
                return self._repeat(known, given, place, opened)
            if known >= TRIALS:
                return usual(*args, **kwargs)
            output, done = self._noted(lambda: usual(*args, **kwargs), given, place, opened)
            unchanged = done is not None and self._equivalence.is_as_before(block)
            self._known[kind] = done if done and unchanged else known + 1
            return output

        setattr(run, REPEATS, True)
        block.forward = run
        undo.callback(vars(block).pop, "forward", None)

    def _note(self, work: KernelCost) -> None:
        if self._noting and self._pass is not None:
            free_dead_tensors()
            self._kernels.append(_Kernel(len(self._card.allocator.history), work, self._pass.layer))

    def _wait(self, _: int) -> None:
        self._waits += 1

    def _noted(
        self, work: Callable[[], Any], given: Sequence[Any], place: _Place, opened: OpenCall
    ) -> tuple[Any, _Done | None]:
        """Run `work` and return its output and its recorded effects; None where these cannot be replayed."""
        free_dead_tensors()
        history = self._card.allocator.history
        before, began, first = self._around(), len(history), len(self._kernels)
        host = self._card.host
        calls_before = host.module_calls
        self._noting += 1
        try:
            output = work()
            free_dead_tensors()
        finally:
            self._noting -= 1
            kernels = self._kernels[first:]
            if not self._noting:
                self._kernels.clear()
        ran = [(each.position - began, each.work, place.relative(each.layer)) for each in kernels]
        if ran:  # without the module calls before the block
            position, work_of_first, its_layer = ran[0]
            own = work_of_first.module_calls - calls_before
            ran[0] = position, dataclasses.replace(work_of_first, module_calls=own), its_layer
        calls_after = host.module_calls - (0 if ran else calls_before)
        layer = place.relative(opened.layer)
        if self._around() != before or opened is not self._pass or layer is None:
            return output, None
        found = block_events(history[began:], ran)
        return output, found and _done(*found, layer, calls_after, given, output)

    def _around(self) -> tuple[Any, ...]:
        """State that a replayable block must leave unchanged."""
        card = self._card
        return self._waits, card.stream, card.bytes_in, card.bytes_out, card.workspace_bytes

    def _repeat(self, done: _Done, given: Sequence[Any], place: _Place, opened: OpenCall) -> Any:
        free_dead_tensors()
        card, made = self._card, list[Block]()
        for event in done.events:
            match event:
                case Allocated():
                    made.append(card.malloc(event.size))
                case Freed():
                    card.allocator.free(made[event.number])
                case Ran():
                    opened.layer = place.layer(event.layer)
                    card.repeat(event.work)
        opened.layer = place.layer(done.layer)
        card.host.module_calls += done.module_calls
        kept = [tensors_in(card, made[number], size, looks) for number, size, looks in done.kept]
        return tree_unflatten([_output(each, given, kept) for each in done.outputs], done.structure)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of module lists at every depth that have submodules, with their dotted paths."""
    for name, child in module.named_children():
        plain = isinstance(child, nn.ModuleList | nn.ModuleDict) or not any(True for _ in child.children())
        if isinstance(module, nn.ModuleList) and not plain:
            yield f"{prefix}{name}", child
        yield from _blocks(child, f"{prefix}{name}.")


def _done(
    events: tuple[BlockEvent, ...],
    there: Mapping[int, int],
    layer: str,
    module_calls: int,
    given: Sequence[Any],
    output: Any,
) -> _Done | None:
    """Combine `events` with how `output` is made of the inputs `given` and the memory `there`; None if it is not."""
    layers, structure = tree_flatten(output)
    inputs = {id(value): place for place, value in enumerate(given) if is_simulated(value)}
    storages = {store_of(given[place]).address: place for place in inputs.values()}
    kept: dict[int, tuple[int, list[ViewSpec]]] = {}
    outputs: list[Any] = []
    for value in layers:
        if isinstance(value, COMPARABLE):
            outputs.append(value)
            continue
        if not is_simulated(value):
            return None
        store = store_of(value)
        if store.values is not None or store.fill is not None or store.valueless:
            return None
        if id(value) in inputs:
            outputs.append(_InputOutput(inputs[id(value)], None))
        elif store.address in storages and given[storages[store.address]].dtype == value.dtype:
            outputs.append(_InputOutput(storages[store.address], ViewSpec.of(value)))
        elif store.block is not None and store.block.number in there:
            looks = kept.setdefault(store.block.number, (store.size, []))[1]
            outputs.append(_OwnOutput(list(kept).index(store.block.number), len(looks)))
            looks.append(ViewSpec.of(value))
        else:
            return None
    if kept.keys() != there.keys():  # memory is kept by something else
        return None
    memory = tuple((there[number], size, tuple(looks)) for number, (size, looks) in kept.items())
    return _Done(events, layer, module_calls, memory, tuple(outputs), structure)


def _output(recorded: Any, given: Sequence[Any], kept: Sequence[Sequence[torch.Tensor]]) -> Any:
    match recorded:
        case _InputOutput(place, None):
            return given[place]
        case _InputOutput(place, ViewSpec() as look):
            return view(given[place], look.shape, look.strides, look.offset)
        case _OwnOutput(place, look):
            return kept[place][look]
    return recorded
