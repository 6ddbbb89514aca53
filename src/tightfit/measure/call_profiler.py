"""A pipeline call on a simulated card → the phases of its Footprint: when each block runs, its bytes and its work."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from tightfit.errors import RunError
from tightfit.measure.modules import find_blocks, find_layers, find_parts, find_role
from tightfit.measure.outer_modules import follow_outer_modules
from tightfit.measure.passes import KernelCounter, OpenBlockUse, OpenCall, OpenPhase, find_phase, weight_blocks
from tightfit.schema.footprint import Phase
from tightfit.simulator.allocator import AllocatorEvent
from tightfit.simulator.allocator_replay import ROUGH, least_capacity, replay, rounded_peak
from tightfit.simulator.backward import follow_nodes
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.storage import free_dead_tensors

__all__ = ["CallProfiler"]

MOST_ANSWERS = 1000  # number of reads answered with zeros: a caller that reads more may loop until another value


class _ProfiledComponent(NamedTuple):
    """The modules of a component that are observed, by dotted path."""

    blocks: dict[str, nn.Module]
    layers: dict[str, tuple[nn.Module, ...]]
    parts: dict[str, nn.Module]


class CallProfiler:
    """Observes components running on `card`, from `follow` on; tensors already on the card are weights.

    Bytes are sampled at every kernel, while its buffers are allocated.
    """

    def __init__(self, card: SimulatedCard, *, expandable: bool = True) -> None:
        """`expandable`: compute allocator bytes for expandable segments."""
        self._card, self._expandable, self._within = card, expandable, 0.0
        free_dead_tensors()
        self._weights = card.allocator.allocated.now - card.workspace_bytes
        self._began = len(card.allocator.history)
        self._standing: dict[int, AllocatorEvent] = {}  # by block number, allocations from before that are still live
        self._followed: dict[str, _ProfiledComponent] = {}
        # what else tells calls of a component apart, besides the shapes of their arguments
        self.kind_of: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] = lambda name, args, kwargs: None
        self.chunked: Mapping[str, Mapping[str, str]] = {}  # as in OpenBlockUse, by component
        self._own: dict[int, int] = {}  # bytes of components' weights by block number
        self._begin_call()

    def for_another_call(self, components: Mapping[str, nn.Module], *, rough: bool = False) -> CallProfiler:
        """Return a profiler for another call of the same `components`; memory left by earlier calls is not weights.
        With `rough`, allocator bytes may be up to 1 % more than needed.
        """
        other = copy.copy(self)
        other._within = ROUGH if rough else 0.0
        other._own = weight_blocks(components)
        other._weights += sum(other._own.values()) - sum(self._own.values())
        other._began = len(self._card.allocator.history)
        other._standing = self._there(other._began)
        other._begin_call()
        return other

    def _begin_call(self) -> None:
        self._phases: list[OpenPhase] = []
        self._open: list[OpenCall] = []
        self._blocks: dict[str, list[str]] = {}
        self._seen: dict[Any, list[OpenBlockUse]] = {}  # block uses of component calls, by component, method and inputs
        self._before = KernelCounter()  # work before the first phase
        self._doubt: RunError | None = None  # unknown values read after denoiser calls, and answered with zeros
        self._answers = 0

    def follow(
        self, components: dict[str, nn.Module], undo: ExitStack, callers: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Observe `components` until `undo` is closed; the `forward` of their `callers`, if any, are their calls."""
        self._own = weight_blocks(components)
        self._card.kernel_callbacks.append(self._kernel)
        undo.callback(self._card.kernel_callbacks.remove, self._kernel)
        self._card.sync_callbacks.append(self._wait)
        undo.callback(self._card.sync_callbacks.remove, self._wait)
        follow_nodes(self._at_node, undo)
        undo.callback(setattr, self._card, "accepts_zeros", self._card.accepts_zeros)
        self._card.accepts_zeros = self._accept_zeros
        for name, module in components.items():
            if name not in self._followed:
                found = find_blocks(module), find_layers(module), find_parts(name, module)
                self._followed[name] = _ProfiledComponent(*found)
            blocks, layers, parts = self._followed[name]
            self._blocks[name] = list(blocks)
            enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
            follow_outer_modules(module, blocks, enter, leave, functools.partial(self._begin_outside, name), undo)
            self._follow_layers(name, layers, undo)
            role = find_role(name, module)
            for method in ("forward", "encode", "decode") if role == "autoencoder" else ("forward",):
                self._follow_method(name, callers.get(name, module), method, find_phase(name, role, method), undo)
            for path, part in parts.items():
                self._follow_part(name, part, path, find_phase(name, role, path), undo)

    @property
    def at_work(self) -> OpenCall | None:
        """The component call in progress, the innermost of several; None if there is none."""
        return self._open[-1] if self._open else None

    def phases(self) -> tuple[Phase, ...]:
        """Return the observed phases."""
        ends = [phase.began for phase in self._phases[1:]] + [len(self._card.allocator.history)]
        return tuple(
            phase.phase(self._blocks, self._allocator_bytes(phase, self._history(phase.began, end), end))
            for phase, end in zip(self._phases, ends, strict=True)
        )

    def _allocator_bytes(self, phase: OpenPhase, history: Sequence[AllocatorEvent], end: int) -> int:
        """Minimum allocator bytes for a phase, plus the excess of a peak caused by repeated calls.

        With fixed segments, what is left of earlier phases holds whole segments: then their history is replayed, too.
        """
        more = 0
        if phase.peak > rounded_peak(history):  # at most the bytes allocated, and faster to compute
            more = max(0, phase.peak - replay(history, 2**60).allocated.peak)
        if not self._expandable:
            history = self._history(self._phases[0].began, end)
        return least_capacity(history, expandable=self._expandable, within=self._within) + more

    def _history(self, begin: int, end: int) -> list[AllocatorEvent]:
        """Allocator events between two of its steps, after allocations of all activations live at the first."""
        steps, workspaces = self._card.allocator.history, self._card.workspace_numbers
        nobodys = workspaces | self._own.keys()
        there = {number: step for number, step in self._there(begin).items() if number not in nobodys}
        events, known = list(there.values()), set(there)
        for step in steps[begin:end]:
            if step.what == "malloc" and step.block not in workspaces:
                known.add(step.block)
            if step.what == "empty_cache" or step.block in known:
                events.append(step)
        return events

    def _there(self, end: int) -> dict[int, AllocatorEvent]:
        """Allocations that are live after `end` steps of the allocator, by block number."""
        there = dict(self._standing)
        for step in self._card.allocator.history[self._began : end]:
            if step.what == "malloc":
                there[step.block] = step
            elif step.what == "free":
                there.pop(step.block, None)
        return there

    def _follow_layers(self, name: str, layers: dict[str, tuple[nn.Module, ...]], undo: ExitStack) -> None:
        for layer, parts in layers.items():
            begin, end = functools.partial(self._at_layer, name, layer), functools.partial(self._at_layer, name, "")
            for part in parts:
                undo.callback(part.register_forward_pre_hook(begin, prepend=True).remove)
                undo.callback(part.register_forward_hook(end, always_call=True).remove)

    def _follow_method(self, name: str, module: object, method: str, phase: str, undo: ExitStack) -> None:
        """Wrap a method such that it records a component call, unless it is called inside one."""
        inner, own = getattr(module, method), vars(module).get(method)

        @functools.wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._works(name):
                return inner(*args, **kwargs)
            self._begin(phase, OpenCall.of(name, method, args, kwargs, self.kind_of(name, args, kwargs)))
            try:
                return inner(*args, **kwargs)
            finally:
                self._end()

        setattr(module, method, run)
        undo.callback(lambda: delattr(module, method) if own is None else setattr(module, method, own))

    def _follow_part(self, name: str, part: nn.Module, path: str, phase: str, undo: ExitStack) -> None:
        """Record a direct call of a submodule, as pipelines make of text models, as a call of its component."""
        begun: list[bool] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(not self._works(name))
            if begun[-1]:
                self._begin(phase, OpenCall.of(name, path, args, kwargs))

        def after(*_: Any) -> None:
            if begun.pop():
                self._end()

        undo.callback(part.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        undo.callback(part.register_forward_hook(after, always_call=True).remove)

    def _works(self, name: str) -> bool:
        return any(each.component == name for each in self._open)

    def _accept_zeros(self, error: RunError) -> bool:
        """Accept a read of unknown values after denoisers have run: it decides nothing if no component runs later."""
        denoised = any(phase.name == find_phase("", "denoiser", "forward") for phase in self._phases)
        self._answers += 1
        accepted = denoised and not self._open and self._answers <= MOST_ANSWERS
        if accepted:
            self._doubt = error
        return accepted

    def _begin(self, phase: str, opened: OpenCall) -> None:
        if self._doubt is not None:
            raise self._doubt
        if not self._phases or self._phases[-1].name != phase:
            self._phases.append(OpenPhase(phase, len(self._card.allocator.history)))
            # work before the first phase counts as its
            self._phases[-1].between, self._before = self._before, KernelCounter()
        self._open.append(opened)
        self.turn("")

    def _end(self) -> None:
        """End a call; one without any kernel was skipped, and is recorded like the previous one with equal inputs.

        But more activations may be live meanwhile, for example where a scheduler keeps outputs of earlier steps.
        """
        done = self._open.pop()
        if done.kernels or not self._seen.get(done.key):
            segments = [segment for segment in done.segments if segment.worked]
        else:
            more = done.segments[0].waiting - self._seen[done.key][0].waiting
            segments = [segment.later(more) for segment in self._seen[done.key]]
        self._seen[done.key] = segments
        self._phases[-1].add(done, segments)

    def _enter(self, name: str, path: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name:
            self._open[-1].inside.append(path)
            self._open[-1].blocks_begun += 1
            self.turn(path)

    def _leave(self, name: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name and self._open[-1].inside:
            inside = self._open[-1].inside
            inside.pop()
            self.turn(inside[-1] if inside else "")

    def _begin_outside(self, name: str, path: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name:
            self._open[-1].begin_outside(path)

    def _at_layer(self, name: str, layer: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name:
            self._open[-1].layer = layer
            self._note_place()

    def _note_place(self) -> None:
        if torch.is_grad_enabled():
            self._open[-1].note_place(torch._C._autograd._get_sequence_nr())

    def _at_node(self, sequence_number: int) -> None:
        """Count the kernels of a node in a backward pass for the layer whose forward made it."""
        if self._open:
            block, layer = self._open[-1].forward_place(sequence_number)
            began, self._open[-1].in_backward = not self._open[-1].in_backward, True
            if began or block != self._open[-1].segments[-1].block:
                self.turn(block)
            self._open[-1].layer = layer

    def left_out(self) -> None:
        """Note that the component call in progress, by what it has computed so far, will leave something out."""
        if self._open and self._open[-1].left_out_from is None:
            self._open[-1].left_out_from = sum(segment.worked for segment in self._open[-1].segments)

    def turn(self, block: str) -> None:
        """Count what follows for `block` of the component call in progress."""
        free_dead_tensors()
        now, opened = self._activations, self._open[-1]
        chunked = self.chunked.get(opened.component, {})
        opened.segments.append(OpenBlockUse(block, now, now, [], opened.in_backward, chunked))
        self._note_place()

    @property
    def _activations(self) -> int:
        return self._card.allocator.allocated.now - self._card.workspace_bytes - self._weights

    def _kernel(self, work: KernelCost) -> None:
        free_dead_tensors()
        now = self._activations
        if self._phases:
            self._phases[-1].peak = max(self._phases[-1].peak, now)
        if self._open:
            self._open[-1].segments[-1].add(self._open[-1].layer, work, now)
            for each in self._open:
                each.kernels += 1
        else:
            (self._phases[-1].between if self._phases else self._before).add(work)
            if self._phases:
                self._phases[-1].outside = max(self._phases[-1].outside, now)

    def _wait(self, copied_in: int) -> None:
        if self._open:
            self._open[-1].segments[-1].wait(self._open[-1].layer, copied_in)
