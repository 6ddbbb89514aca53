"""A call on a pretend card → the phases of its Footprint: which unit works when, what it holds and what it costs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tightfit.footprint import Pass, Phase, Turn, Use
from tightfit.measure.call_signature import call_signature
from tightfit.measure.modules import find_leaves, find_parts, find_phase, find_role, find_units
from tightfit.measure.tally import Tally
from tightfit.pretend.allocator import Step
from tightfit.pretend.card import Card
from tightfit.pretend.history import least_capacity, replay
from tightfit.pretend.kernels import Work
from tightfit.pretend.storage import settle

__all__ = ["Ledger"]


@dataclass
class _Turn:
    """Of one leaf, or of what is done between leaves ("")."""

    leaf: str
    tally: Tally = field(default_factory=Tally)
    waits: bool = False


@dataclass
class _Stretch:
    """A unit's turn while it lasts."""

    unit: str
    waiting: int
    peak: int
    turns: list[_Turn] = field(default_factory=list)

    @property
    def worked(self) -> bool:
        return bool(self.unit or self.turns)

    def add(self, leaf: str, work: Work) -> None:
        self._turn(leaf).tally.add(work)

    def wait(self, leaf: str) -> None:
        """The host waits for `leaf`, and for all before it."""
        self._turn(leaf).waits = True

    def _turn(self, leaf: str) -> _Turn:
        if not self.turns or self.turns[-1].leaf != leaf or self.turns[-1].waits:
            self.turns.append(_Turn(leaf))
        return self.turns[-1]

    def later(self, more: int) -> _Stretch:
        """The same, with `more` bytes waiting."""
        return _Stretch(self.unit, self.waiting + more, self.peak + more, self.turns)

    def use(self) -> Use:
        turns = tuple(Turn(leaf=each.leaf, work=each.tally.workloads(), waits=each.waits) for each in self.turns)
        return Use(unit=self.unit, waiting=self.waiting, peak=self.peak, turns=turns)


@dataclass
class _Open:
    """A pass while it lasts."""

    component: str
    method: str
    inputs: tuple[Any, ...]
    stretches: list[_Stretch] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # units that are at work, the innermost last
    leaf: str = ""  # that is at work
    kernels: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.component, self.method, self.inputs


class _PhaseLedger:
    """The passes of one phase: those alike (in inputs and in the units they use) are one kind, kept at its highest."""

    def __init__(self, name: str, began: int) -> None:
        self.name = name
        self.began = began  # at which step of the allocator
        self.peak = self.outside = 0
        self.between = Tally()
        self._kinds: dict[Any, list[_Stretch]] = {}
        self._order: list[Any] = []

    def add(self, done: _Open, stretches: list[_Stretch]) -> None:
        kind = (*done.key, tuple(stretch.unit for stretch in stretches))
        if kind not in self._kinds or _highest(stretches) > _highest(self._kinds[kind]):
            self._kinds[kind] = stretches
        self._order.append(kind)
        self.peak = max(self.peak, _highest(stretches))

    def phase(self, units: dict[str, list[str]], room: int) -> Phase:
        """`units` are all there are, by component; `room` is what an allocator wants for its activations."""
        kinds = list(self._kinds)
        used: dict[str, list[set[str]]] = {}
        for component, *_, names in kinds:
            used.setdefault(component, []).append(set(names))
        skipped = [f"{c}.{u}" for c, sets in used.items() for u in units[c] if u not in set.union(*sets)]
        always = {c: set.intersection(*sets) for c, sets in used.items()}
        some = [f"{c}.{u}" for c, sets in used.items() for u in units[c] if u in set.union(*sets) - always[c]]
        return Phase(
            name=self.name,
            peak=self.peak,
            outside=self.outside,
            room=room,
            passes=tuple(self._pass(kind) for kind in kinds),
            order=tuple(map(kinds.index, self._order)),
            between=self.between.workloads(),
            skipped=tuple(skipped),
            conditional=tuple(some),
        )

    def _pass(self, kind: Any) -> Pass:
        uses = tuple(stretch.use() for stretch in self._kinds[kind])
        component, method = kind[:2]
        peak = _highest(self._kinds[kind])
        return Pass(component=component, method=method, runs=self._order.count(kind), peak=peak, uses=uses)


def _highest(stretches: list[_Stretch]) -> int:
    return max((stretch.peak for stretch in stretches), default=0)


class Ledger:
    """Follows components at work on `card`, from `follow` on; what is on the card by then is weights.

    Bytes are looked at with every kernel, while it holds what it holds.
    """

    def __init__(self, card: Card, *, expandable: bool = True) -> None:
        """`expandable`: rooms are for an allocator whose segments grow."""
        self._card, self._expandable = card, expandable
        settle()
        self._weights = card.allocator.allocated.now - card.workspace_bytes
        self._began = len(card.allocator.history)
        self._phases: list[_PhaseLedger] = []
        self._open: list[_Open] = []
        self._units: dict[str, list[str]] = {}
        self._seen: dict[Any, list[_Stretch]] = {}  # passes, by what could be seen of them before they began
        self._before = Tally()  # work before the first phase

    def follow(self, components: dict[str, nn.Module], undo: ExitStack) -> None:
        """Listens to `components` until `undo` is closed."""
        self._card.watchers.append(self._kernel)
        undo.callback(self._card.watchers.remove, self._kernel)
        self._card.awaiters.append(self._wait)
        undo.callback(self._card.awaiters.remove, self._wait)
        for name, module in components.items():
            self._follow_units(name, find_units(module), undo)
            self._follow_leaves(name, find_leaves(module), undo)
            role = find_role(name, module)
            for method in ("forward", "encode", "decode") if role == "autoencoder" else ("forward",):
                self._follow_method(name, module, method, find_phase(name, role, method), undo)
            for path, part in find_parts(name, module).items():
                self._follow_part(name, part, path, find_phase(name, role, path), undo)

    def phases(self) -> tuple[Phase, ...]:
        """What was seen."""
        ends = [phase.began for phase in self._phases[1:]] + [len(self._card.allocator.history)]
        return tuple(
            phase.phase(self._units, self._room(phase, self._history(phase.began, end), end))
            for phase, end in zip(self._phases, ends, strict=True)
        )

    def _room(self, phase: _PhaseLedger, history: Sequence[Step], end: int) -> int:
        """Bytes that an allocator must have for a phase at the least, and for a peak that repeated passes brought.

        Where segments are fixed, what is left of the phases before keeps whole ones: then those are asked again, too.
        """
        more = max(0, phase.peak - replay(history, 2**60).allocated.peak)
        if self._expandable:
            return least_capacity(history, expandable=True) + more
        return least_capacity(self._history(self._phases[0].began, end)) + more

    def _history(self, begin: int, end: int) -> list[Step]:
        """What was asked of the allocator between two of its steps; first, all activations that were there by then."""
        steps, workspaces = self._card.allocator.history, self._card.workspace_numbers
        there: dict[int, Step] = {}
        for step in steps[self._began : begin]:
            if step.what == "malloc":
                there[step.block] = step
            elif step.what == "free":
                there.pop(step.block, None)
        there = {number: step for number, step in there.items() if number not in workspaces}
        asked, known = list(there.values()), set(there)
        for step in steps[begin:end]:
            if step.what == "malloc" and step.block not in workspaces:
                known.add(step.block)
            if step.what == "empty_cache" or step.block in known:
                asked.append(step)
        return asked

    def _follow_units(self, name: str, units: dict[str, nn.Module], undo: ExitStack) -> None:
        self._units[name] = list(units)
        for path, unit in units.items():
            enter, leave = functools.partial(self._enter, name, path), functools.partial(self._leave, name)
            undo.callback(unit.register_forward_pre_hook(enter, prepend=True).remove)
            undo.callback(unit.register_forward_hook(leave, always_call=True).remove)

    def _follow_leaves(self, name: str, leaves: dict[str, tuple[nn.Module, ...]], undo: ExitStack) -> None:
        for leaf, parts in leaves.items():
            begin, end = functools.partial(self._at_leaf, name, leaf), functools.partial(self._at_leaf, name, "")
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
            self._begin(phase, _Open(name, method, call_signature(args, kwargs)))
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
                self._begin(phase, _Open(name, path, call_signature(args, kwargs)))

        def after(*_: Any) -> None:
            if begun.pop():
                self._end()

        undo.callback(part.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        undo.callback(part.register_forward_hook(after, always_call=True).remove)

    def _works(self, name: str) -> bool:
        return any(each.component == name for each in self._open)

    def _begin(self, phase: str, opened: _Open) -> None:
        if not self._phases or self._phases[-1].name != phase:
            self._phases.append(_PhaseLedger(phase, len(self._card.allocator.history)))
            self._phases[-1].between, self._before = self._before, Tally()  # what was done before the first is its
        self._open.append(opened)
        self._turn("")

    def _end(self) -> None:
        """A pass without any kernel was not worked through: it is as the one before with the same inputs.

        But more may wait meanwhile: a scheduler that remembers some steps, for one.
        """
        done = self._open.pop()
        if done.kernels or done.key not in self._seen:
            stretches = [stretch for stretch in done.stretches if stretch.worked]
        else:
            more = done.stretches[0].waiting - self._seen[done.key][0].waiting
            stretches = [stretch.later(more) for stretch in self._seen[done.key]]
        self._seen[done.key] = stretches
        self._phases[-1].add(done, stretches)

    def _enter(self, name: str, path: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name:
            self._open[-1].inside.append(path)
            self._turn(path)

    def _leave(self, name: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name and self._open[-1].inside:
            inside = self._open[-1].inside
            inside.pop()
            self._turn(inside[-1] if inside else "")

    def _at_leaf(self, name: str, leaf: str, *_: Any) -> None:
        if self._open and self._open[-1].component == name:
            self._open[-1].leaf = leaf

    def _turn(self, unit: str) -> None:
        settle()
        now = self._activations
        self._open[-1].stretches.append(_Stretch(unit, now, now))

    @property
    def _activations(self) -> int:
        return self._card.allocator.allocated.now - self._card.workspace_bytes - self._weights

    def _kernel(self, work: Work) -> None:
        settle()
        now = self._activations
        if self._phases:
            self._phases[-1].peak = max(self._phases[-1].peak, now)
        if self._open:
            stretch = self._open[-1].stretches[-1]
            stretch.peak = max(stretch.peak, now)
            stretch.add(self._open[-1].leaf, work)
            for each in self._open:
                each.kernels += 1
        else:
            (self._phases[-1].between if self._phases else self._before).add(work)
            if self._phases:
                self._phases[-1].outside = max(self._phases[-1].outside, now)

    def _wait(self) -> None:
        if self._open:
            self._open[-1].stretches[-1].wait(self._open[-1].leaf)
