"""Blocks that are alike, on a simulated card: one of them works, and of the others the card sees what that one did.

On shapes alone, what a block asks of the allocator and which kernels it runs depends on its layers and on the layouts
that it is given. So the first of its kind is noted in each pass of a network, and repeated for all that are alike: to
the allocator, to the clock and to whoever watches kernels. Blocks that wait for numbers, cross the link, leave
something behind or free what others made work each time.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.module_equivalence import REPEATS, ModuleEquivalence
from tightfit.measure.modules import find_layers, find_role
from tightfit.measure.passes import OpenPass
from tightfit.simulator.allocator import AllocatorEvent
from tightfit.simulator.blocks import Block
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import Look, free_dead_tensors, store_of, tensors_in, view

__all__ = ["BlockReplay"]

TRIALS = 3  # of a kind of block in a pass: the first may take cuBLAS's workspace, which stays
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


class _Place(NamedTuple):
    """Where a block is in its component. Blocks that are alike tell their leaves alike."""

    path: str
    layers: tuple[str, ...]  # as they are told

    def told(self, layer: str) -> str | None:
        """ ":" and what comes behind the block's own path; "" for none at all, None for a leaf that is not in here."""
        if layer and not _is_within(layer, self.path):
            return None
        return layer and f":{layer[len(self.path) :]}"

    def layer(self, told: str) -> str:
        return told and f"{self.path}{told[1:]}"


class _Kernel(NamedTuple):
    position: int  # in the allocator's history
    work: KernelCost
    layer: str  # at work


class _Asked(NamedTuple):
    """Memory, of which a block's is numbered in this order."""

    size: int


class _Freed(NamedTuple):
    number: int


class _Ran(NamedTuple):
    work: KernelCost
    layer: str  # as it is told


class _Given(NamedTuple):
    """An output that is an input, or a view of it."""

    place: int
    look: Look | None  # None: itself


class _Kept(NamedTuple):
    """An output in memory that the block asked for."""

    place: int  # among the memory that is kept
    look: int  # of those at it


class _Done(NamedTuple):
    """What one block did."""

    events: tuple[_Asked | _Freed | _Ran, ...]
    layer: str  # that is at work afterwards, as it is told
    kept: tuple[tuple[int, int, tuple[Look, ...]], ...]  # memory of outputs: its number, bytes, and the looks at it
    outputs: tuple[Any, ...]  # their leaves: _Given, _Kept, or as they are
    structure: TreeSpec


class BlockReplay:
    """Lets each kind of block of `components` work once in each pass on `card`; autoencoders work as they are."""

    def __init__(self, components: Mapping[str, nn.Module], card: SimulatedCard, undo: ExitStack) -> None:
        self._card = card
        self._ledger: CallProfiler | None = None
        self._kernels: list[_Kernel] = []  # since the outermost block that is being noted began
        self._noting = self._waits = 0
        self._pass: OpenPass | None = None
        self._known: dict[Any, _Done | int] = {}  # of the pass: by kind what it did, or how often nothing was learned
        self._likeness = ModuleEquivalence()
        card.watchers.append(self._note)
        undo.callback(card.watchers.remove, self._note)
        card.awaiters.append(self._wait)
        undo.callback(card.awaiters.remove, self._wait)
        for name, module in components.items():
            if find_role(name, module) != "autoencoder":
                layers = find_layers(module)
                for path, block in _blocks(module):
                    bare = _Place(path, ())
                    within = tuple(told for layer in layers if (told := bare.told(layer)) is not None)
                    self._follow(name, _Place(path, within), block, undo)

    def listen(self, ledger: CallProfiler) -> None:
        """From now on it is `ledger` that knows which pass is under way."""
        self._ledger, self._pass = ledger, None

    def _follow(self, name: str, place: _Place, block: nn.Module, undo: ExitStack) -> None:
        if "forward" in vars(block):
            return

        @functools.wraps(block.forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            usual = functools.partial(type(block).forward, block)  # which variants change
            opened = self._ledger.at_work if self._ledger else None
            if opened is None or opened.component != name:
                return usual(*args, **kwargs)
            if opened is not self._pass:
                self._pass, self._known, self._likeness = opened, {}, ModuleEquivalence()
            given, structure = tree_flatten((args, kwargs))
            layouts = _layouts(given)
            if layouts is None:
                return usual(*args, **kwargs)
            kind = self._likeness.of(block), place.layers, structure, layouts
            known = self._known.get(kind, 0)
            if isinstance(known, _Done):
                return self._repeat(known, given, place, opened)
            if known >= TRIALS:
                return usual(*args, **kwargs)
            output, done = self._noted(lambda: usual(*args, **kwargs), given, place, opened)
            unchanged = done is not None and self._likeness.is_as_before(block)
            self._known[kind] = done if done and unchanged else known + 1
            return output

        setattr(run, REPEATS, True)
        block.forward = run
        undo.callback(vars(block).pop, "forward", None)

    def _note(self, work: KernelCost) -> None:
        if self._noting and self._pass is not None:
            free_dead_tensors()
            self._kernels.append(_Kernel(len(self._card.allocator.history), work, self._pass.layer))

    def _wait(self) -> None:
        self._waits += 1

    def _noted(
        self, work: Callable[[], Any], given: Sequence[Any], place: _Place, opened: OpenPass
    ) -> tuple[Any, _Done | None]:
        """What `work` gives, and what it did; None where that cannot be repeated."""
        free_dead_tensors()
        history = self._card.allocator.history
        before, began, first = self._around(), len(history), len(self._kernels)
        self._noting += 1
        try:
            output = work()
            free_dead_tensors()
        finally:
            self._noting -= 1
            kernels = self._kernels[first:]
            if not self._noting:
                self._kernels.clear()
        ran = [(each.position - began, each.work, place.told(each.layer)) for each in kernels]
        layer = place.told(opened.layer)
        if self._around() != before or opened is not self._pass or layer is None:
            return output, None
        found = _events(history[began:], ran)
        return output, found and _done(*found, layer, given, output)

    def _around(self) -> tuple[Any, ...]:
        """What a block that can be repeated leaves as it is."""
        card = self._card
        return self._waits, card.stream, card.bytes_in, card.bytes_out, card.workspace_bytes

    def _repeat(self, done: _Done, given: Sequence[Any], place: _Place, opened: OpenPass) -> Any:
        free_dead_tensors()
        card, made = self._card, list[Block]()
        for event in done.events:
            match event:
                case _Asked():
                    made.append(card.malloc(event.size))
                case _Freed():
                    card.allocator.free(made[event.number])
                case _Ran():
                    opened.layer = place.layer(event.layer)
                    card.repeat(event.work)
        opened.layer = place.layer(done.layer)
        kept = [tensors_in(card, made[number], size, looks) for number, size, looks in done.kept]
        return tree_unflatten([_output(each, given, kept) for each in done.outputs], done.structure)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The elements of module lists at every depth that are made of other modules, by dotted path."""
    for name, child in module.named_children():
        plain = isinstance(child, nn.ModuleList | nn.ModuleDict) or not any(True for _ in child.children())
        if isinstance(module, nn.ModuleList) and not plain:
            yield f"{prefix}{name}", child
        yield from _blocks(child, f"{prefix}{name}.")


def _is_within(layer: str, path: str) -> bool:
    return layer == path or layer.startswith(f"{path}.")


def _is_tensor(value: Any) -> bool:
    """Whether it is an ordinary one on a simulated card."""
    return type(value) is torch.Tensor and value.device.type == NAME


def _layouts(given: Sequence[Any]) -> tuple[Any, ...] | None:
    """What inputs of blocks that are alike have in common; None where not all of them can be compared."""
    storages: dict[int, int] = {}
    found: list[Any] = []
    for value in given:
        if _is_tensor(value):
            store = store_of(value)
            same = storages.setdefault(store.address, len(storages))
            numbers = store.fill if store.values is None else store.address  # what is known is only like itself
            found.append((same, store.values is None, numbers, _look(value)))
        elif isinstance(value, _PLAIN):
            found.append((type(value), value))
        else:
            return None
    return tuple(found)


def _look(tensor: torch.Tensor) -> Look:
    return Look(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _events(
    steps: Sequence[AllocatorEvent], ran: Sequence[tuple[int, KernelCost, str | None]]
) -> tuple[tuple[_Asked | _Freed | _Ran, ...], dict[int, int]] | None:
    """What a block did with `steps` of the allocator, of which so many came before each kernel that `ran`.

    And by their numbers there, which memory that it asked for it did not give back. None for what cannot be repeated.
    """
    events: list[_Asked | _Freed | _Ran] = []
    there: dict[int, int] = {}
    asked, kernels = 0, deque(ran)
    for position, step in enumerate((*steps, None)):
        while kernels and (step is None or kernels[0][0] <= position):
            _, work, layer = kernels.popleft()
            if layer is None:  # one outside, which others do not have
                return None
            events.append(_Ran(work, layer))
        if step is None:
            break
        if step.what == "malloc":
            there[step.block] = asked
            asked += 1
            events.append(_Asked(step.size))
        elif step.what == "free" and step.block in there:
            events.append(_Freed(there.pop(step.block)))
        else:
            return None
    return tuple(events), there


def _done(
    events: tuple[_Asked | _Freed | _Ran, ...], there: Mapping[int, int], layer: str, given: Sequence[Any], output: Any
) -> _Done | None:
    """With how `output` is made of what was `given`, and of the memory that is `there`; None where it is not."""
    layers, structure = tree_flatten(output)
    inputs = {id(value): place for place, value in enumerate(given) if _is_tensor(value)}
    storages = {store_of(given[place]).address: place for place in inputs.values()}
    kept: dict[int, tuple[int, list[Look]]] = {}
    outputs: list[Any] = []
    for value in layers:
        if isinstance(value, _PLAIN):
            outputs.append(value)
            continue
        if not _is_tensor(value):
            return None
        store = store_of(value)
        if store.values is not None or store.fill is not None or store.hollow:
            return None
        if id(value) in inputs:
            outputs.append(_Given(inputs[id(value)], None))
        elif store.address in storages and given[storages[store.address]].dtype == value.dtype:
            outputs.append(_Given(storages[store.address], _look(value)))
        elif store.block is not None and store.block.number in there:
            looks = kept.setdefault(store.block.number, (store.size, []))[1]
            outputs.append(_Kept(list(kept).index(store.block.number), len(looks)))
            looks.append(_look(value))
        else:
            return None
    if kept.keys() != there.keys():  # something else keeps it
        return None
    memory = tuple((there[number], size, tuple(looks)) for number, (size, looks) in kept.items())
    return _Done(events, layer, memory, tuple(outputs), structure)


def _output(told: Any, given: Sequence[Any], kept: Sequence[Sequence[torch.Tensor]]) -> Any:
    match told:
        case _Given(place, None):
            return given[place]
        case _Given(place, Look() as look):
            return view(given[place], look.shape, look.strides, look.offset)
        case _Kept(place, look):
            return kept[place][look]
    return told
