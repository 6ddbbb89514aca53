"""Passes and phases of a call while they last: what each unit does in its turn, and how many bytes there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tightfit.measure.kernel_counter import KernelCounter
from tightfit.schema.footprint import BlockUse, ComponentCall, LayerWork, Phase
from tightfit.simulator.kernel_costs import KernelCost

__all__ = ["OpenPass", "OpenPhase", "OpenUse"]


@dataclass
class OpenTurn:
    """Of one leaf, or of what is done between leaves ("")."""

    layer: str
    tally: KernelCounter = field(default_factory=KernelCounter)
    waits: bool = False


@dataclass
class OpenUse:
    """A unit's turn while it lasts."""

    block: str
    waiting: int
    peak: int
    turns: list[OpenTurn] = field(default_factory=list)

    @property
    def worked(self) -> bool:
        return bool(self.block or self.turns)

    def add(self, layer: str, work: KernelCost) -> None:
        self._turn(layer).tally.add(work)

    def wait(self, layer: str) -> None:
        """The host waits for `layer`, and for all before it."""
        self._turn(layer).waits = True

    def _turn(self, layer: str) -> OpenTurn:
        if not self.turns or self.turns[-1].layer != layer or self.turns[-1].waits:
            self.turns.append(OpenTurn(layer))
        return self.turns[-1]

    def later(self, more: int) -> OpenUse:
        """The same, with `more` bytes waiting."""
        return OpenUse(self.block, self.waiting + more, self.peak + more, self.turns)

    def use(self) -> BlockUse:
        turns = tuple(
            LayerWork(layer=each.layer, work=each.tally.workloads(), host_waits=each.waits) for each in self.turns
        )
        return BlockUse(block=self.block, live_bytes_at_start=self.waiting, peak=self.peak, layer_work=turns)


@dataclass
class OpenPass:
    """A pass while it lasts."""

    component: str
    method: str
    inputs: tuple[Any, ...]
    segments: list[OpenUse] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # units that are at work, the innermost last
    layer: str = ""  # that is at work
    kernels: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.component, self.method, self.inputs


class OpenPhase:
    """The passes of one phase: those alike (in inputs and in the units they use) are one kind, kept at its highest."""

    def __init__(self, name: str, began: int) -> None:
        self.name = name
        self.began = began  # at which step of the allocator
        self.peak = self.outside = 0
        self.between = KernelCounter()
        self._kinds: dict[Any, list[OpenUse]] = {}
        self._order: list[Any] = []

    def add(self, done: OpenPass, segments: list[OpenUse]) -> None:
        kind = (*done.key, tuple(segment.block for segment in segments))
        if kind not in self._kinds or _highest(segments) > _highest(self._kinds[kind]):
            self._kinds[kind] = segments
        self._order.append(kind)
        self.peak = max(self.peak, _highest(segments))

    def phase(self, blocks: dict[str, list[str]], room: int) -> Phase:
        """`blocks` are all there are, by component; `room` is what an allocator wants for its activations."""
        kinds = list(self._kinds)
        used: dict[str, list[set[str]]] = {}
        for component, *_, names in kinds:
            used.setdefault(component, []).append(set(names))
        skipped = [f"{c}.{u}" for c, sets in used.items() for u in blocks[c] if u not in set.union(*sets)]
        always = {c: set.intersection(*sets) for c, sets in used.items()}
        some = [f"{c}.{u}" for c, sets in used.items() for u in blocks[c] if u in set.union(*sets) - always[c]]
        return Phase(
            name=self.name,
            peak=self.peak,
            peak_between_calls=self.outside,
            allocator_bytes=room,
            calls=tuple(self._pass(kind) for kind in kinds),
            call_order=tuple(map(kinds.index, self._order)),
            other_work=self.between.workloads(),
            unused_blocks=tuple(skipped),
            conditional_blocks=tuple(some),
        )

    def _pass(self, kind: Any) -> ComponentCall:
        uses = tuple(segment.use() for segment in self._kinds[kind])
        component, method = kind[:2]
        peak = _highest(self._kinds[kind])
        return ComponentCall(
            component=component, method=method, runs=self._order.count(kind), peak=peak, block_uses=uses
        )


def _highest(segments: list[OpenUse]) -> int:
    return max((segment.peak for segment in segments), default=0)
