"""A call on a simulated card → the phases of its Footprint: which unit works when, what it holds and what it costs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn

from tightfit.errors import RunError
from tightfit.measure.kernel_counter import KernelCounter
from tightfit.measure.module_equivalence import call_signature
from tightfit.measure.modules import find_blocks, find_layers, find_parts, find_phase, find_role, weight_tensors
from tightfit.measure.passes import OpenPass, OpenPhase, OpenUse
from tightfit.schema.footprint import Phase
from tightfit.simulator.allocator import AllocatorEvent
from tightfit.simulator.allocator_replay import least_capacity, replay, rounded_peak
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import free_dead_tensors, store_of

__all__ = ["CallProfiler"]

MOST_ANSWERS = 1000  # with zeros: who asks more often may wait for another answer


class _ProfiledComponent(NamedTuple):
    """What of a component is listened to, by dotted path."""

    blocks: dict[str, nn.Module]
    layers: dict[str, tuple[nn.Module, ...]]
    parts: dict[str, nn.Module]


class CallProfiler:
    """Follows components at work on `card`, from `follow` on; what is on the card by then is weights.

    Bytes are looked at with every kernel, while it holds what it holds.
    """

    def __init__(self, card: SimulatedCard, *, expandable: bool = True) -> None:
        """`expandable`: rooms are for an allocator whose segments grow."""
        self._card, self._expandable = card, expandable
        free_dead_tensors()
        self._weights = card.allocator.allocated.now - card.workspace_bytes
        self._began = len(card.allocator.history)
        self._standing: dict[
            int, AllocatorEvent
        ] = {}  # by their numbers, what blocks were asked for before that are there yet
        self._followed: dict[str, _ProfiledComponent] = {}
        self._own: dict[int, int] = {}  # bytes of components' weights, by the numbers of their blocks
        self._begin_call()

    def for_another_call(self, components: Mapping[str, nn.Module]) -> CallProfiler:
        """One that follows another call of the same `components`, after this one: what calls left is no weight."""
        other = copy.copy(self)
        other._own = _blocks_of(components)
        other._weights += sum(other._own.values()) - sum(self._own.values())
        other._began = len(self._card.allocator.history)
        other._standing = self._there(other._began)
        other._begin_call()
        return other

    def _begin_call(self) -> None:
        self._phases: list[OpenPhase] = []
        self._open: list[OpenPass] = []
        self._blocks: dict[str, list[str]] = {}
        self._seen: dict[Any, list[OpenUse]] = {}  # passes, by what could be seen of them before they began
        self._before = KernelCounter()  # work before the first phase
        self._doubt: RunError | None = None  # what was asked for after denoisers' passes, and answered with zeros
        self._answers = 0

    def follow(self, components: dict[str, nn.Module], undo: ExitStack) -> None:
        """Listens to `components` until `undo` is closed."""
        self._own = _blocks_of(components)
        self._card.watchers.append(self._kernel)
        undo.callback(self._card.watchers.remove, self._kernel)
        self._card.awaiters.append(self._wait)
        undo.callback(self._card.awaiters.remove, self._wait)
        undo.callback(setattr, self._card, "judge", self._card.judge)
        self._card.judge = self._judge
        for name, module in components.items():
            if name not in self._followed:
                self._followed[name] = _ProfiledComponent(
                    find_blocks(module), find_layers(module), find_parts(name, module)
                )
            blocks, layers, parts = self._followed[name]
            self._follow_units(name, blocks, undo)
            self._follow_leaves(name, layers, undo)
            role = find_role(name, module)
            for method in ("forward", "encode", "decode") if role == "autoencoder" else ("forward",):
                self._follow_method(name, module, method, find_phase(name, role, method), undo)
            for path, part in parts.items():
                self._follow_part(name, part, path, find_phase(name, role, path), undo)

    @property
    def at_work(self) -> OpenPass | None:
        """The pass that is under way, the innermost of several."""
        return self._open[-1] if self._open else None

    def phases(self) -> tuple[Phase, ...]:
        """What was seen."""
        ends = [phase.began for phase in self._phases[1:]] + [len(self._card.allocator.history)]
        return tuple(
            phase.phase(self._blocks, self._room(phase, self._history(phase.began, end), end))
            for phase, end in zip(self._phases, ends, strict=True)
        )

    def _room(self, phase: OpenPhase, history: Sequence[AllocatorEvent], end: int) -> int:
        """Bytes that an allocator must have for a phase at the least, and for a peak that repeated passes brought.

        Where segments are fixed, what is left of the phases before keeps whole ones: then those are asked again, too.
        """
        more = 0
        if phase.peak > rounded_peak(history):  # which is no more than was allocated, and found sooner
            more = max(0, phase.peak - replay(history, 2**60).allocated.peak)
        if self._expandable:
            return least_capacity(history, expandable=True) + more
        return least_capacity(self._history(self._phases[0].began, end)) + more

    def _history(self, begin: int, end: int) -> list[AllocatorEvent]:
        """What was asked of the allocator between two of its steps; first, all activations that were there by then."""
        steps, workspaces = self._card.allocator.history, self._card.workspace_numbers
        nobodys = workspaces | self._own.keys()
        there = {number: step for number, step in self._there(begin).items() if number not in nobodys}
        asked, known = list(there.values()), set(there)
        for step in steps[begin:end]:
            if step.what == "malloc" and step.block not in workspaces:
                known.add(step.block)
            if step.what == "empty_cache" or step.block in known:
                asked.append(step)
        return asked

    def _there(self, end: int) -> dict[int, AllocatorEvent]:
        """By their numbers, what blocks were asked for that are there after `end` steps of the allocator."""
        there = dict(self._standing)
        for step in self._card.allocator.history[self._began : end]:
            if step.what == "malloc":
                there[step.block] = step
            elif step.what == "free":
                there.pop(step.block, None)
        return there

    def _follow_units(self, name: str, blocks: dict[str, nn.Module], undo: ExitStack) -> None:
        self._blocks[name] = list(blocks)
        for path, block in blocks.items():
            enter, leave = functools.partial(self._enter, name, path), functools.partial(self._leave, name)
            undo.callback(block.register_forward_pre_hook(enter, prepend=True).remove)
            undo.callback(block.register_forward_hook(leave, always_call=True).remove)

    def _follow_leaves(self, name: str, layers: dict[str, tuple[nn.Module, ...]], undo: ExitStack) -> None:
        for layer, parts in layers.items():
            begin, end = functools.partial(self._at_leaf, name, layer), functools.partial(self._at_leaf, name, "")
            for part in parts:
                undo.callback(part.register_forward_pre_hook(begin, prepend=True).remove)
                undo.callback(part.register_forward_hook(end, always_call=True).remove)

    def _follow_method(self, name: str, module: nn.Module, method: str, phase: str, undo: ExitStack) -> None:
        """Replaces a method by one that is a pass, unless it is called inside one."""
        inner, own = getattr(module, method), vars(module).get(method)

        @functools.wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._works(name):
                return inner(*args, **kwargs)
            self._begin(phase, OpenPass(name, method, call_signature(args, kwargs)))
            try:
                return inner(*args, **kwargs)
            finally:
                self._end()

        setattr(module, method, run)
        undo.callback(lambda: delattr(module, method) if own is None else setattr(module, method, own))

    def _follow_part(self, name: str, part: nn.Module, path: str, phase: str, undo: ExitStack) -> None:
        """A child that is called by itself, as pipelines do with text models, is a pass of its component."""
        begun: list[bool] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(not self._works(name))
            if begun[-1]:
                self._begin(phase, OpenPass(name, path, call_signature(args, kwargs)))

        def after(*_: Any) -> None:
            if begun.pop():
                self._end()

        undo.callback(part.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        undo.callback(part.register_forward_hook(after, always_call=True).remove)

    def _works(self, name: str) -> bool:
        return any(each.component == name for each in self._open)

    def _judge(self, error: RunError) -> None:
        """Numbers that are asked for when denoisers have worked decide nothing, unless something works afterwards."""
        denoised = any(phase.name == find_phase("", "denoiser", "forward") for phase in self._phases)
        self._answers += 1
        if self._open or not denoised or self._answers > MOST_ANSWERS:
            raise error
        self._doubt = error

    def _begin(self, phase: str, opened: OpenPass) -> None:
        if self._doubt is not None:
            raise self._doubt
        if not self._phases or self._phases[-1].name != phase:
            self._phases.append(OpenPhase(phase, len(self._card.allocator.history)))
            self._phases[-1].between, self._before = (
                self._before,
                KernelCounter(),
            )  # what was done before the first is its
        self._open.append(opened)
        self._turn("")

    def _end(self) -> None:
        """A pass without any kernel was not worked through: it is as the one before with the same inputs.

        But more may wait meanwhile: a scheduler that remembers some steps, for one.
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
            self._turn(path)

    def _leave(self, name: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name and self._open[-1].inside:
            inside = self._open[-1].inside
            inside.pop()
            self._turn(inside[-1] if inside else "")

    def _at_leaf(self, name: str, layer: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name:
            self._open[-1].layer = layer

    def _turn(self, block: str) -> None:
        free_dead_tensors()
        now = self._activations
        self._open[-1].segments.append(OpenUse(block, now, now))

    @property
    def _activations(self) -> int:
        return self._card.allocator.allocated.now - self._card.workspace_bytes - self._weights

    def _kernel(self, work: KernelCost) -> None:
        free_dead_tensors()
        now = self._activations
        if self._phases:
            self._phases[-1].peak = max(self._phases[-1].peak, now)
        if self._open:
            segment = self._open[-1].segments[-1]
            segment.peak = max(segment.peak, now)
            segment.add(self._open[-1].layer, work)
            for each in self._open:
                each.kernels += 1
        else:
            (self._phases[-1].between if self._phases else self._before).add(work)
            if self._phases:
                self._phases[-1].outside = max(self._phases[-1].outside, now)

    def _wait(self) -> None:
        if self._open:
            self._open[-1].segments[-1].wait(self._open[-1].layer)


def _blocks_of(components: Mapping[str, nn.Module]) -> dict[int, int]:
    """Bytes of the weights of `components` on cards, by the numbers of their blocks."""
    tensors = [each for module in components.values() for each in weight_tensors(module) if each.device.type == NAME]
    blocks = [store_of(each).block for each in tensors]
    return {block.number: block.size for block in blocks if block is not None}
