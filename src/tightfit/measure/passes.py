"""Component calls and phases in progress: the work of each block use, and the bytes of activations."""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.measure.module_equivalence import call_signature
from tightfit.measure.modules import weight_tensors
from tightfit.schema.footprint import BlockUse, ComponentCall, Phase, Role
from tightfit.schema.machine import Amounts, KernelGroup, LayerWork
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import store_of

__all__ = ["KernelCounter", "OpenBlockUse", "OpenCall", "OpenPhase", "find_phase", "weight_blocks"]

_PHASES: dict[Role, str] = {"encoder": "encode", "denoiser": "denoise", "autoencoder": "decode"}


def weight_blocks(components: Mapping[str, nn.Module]) -> dict[int, int]:
    """Bytes of the weights of `components` on simulated cards, by allocator block number."""
    tensors = [each for module in components.values() for each in weight_tensors(module) if each.device.type == NAME]
    blocks = [store_of(each).block for each in tensors]
    return {block.number: block.size for block in blocks if block is not None}


def find_phase(name: str, role: Role, method: str) -> str:
    """Return the phase of a pipeline call in which `method` of the component `name` runs."""
    if role == "autoencoder" and method == "encode":
        return "encode inputs"  # not with text encoders: strips are measured where a phase has calls of one kind
    return _PHASES.get(role, name)


class KernelCounter:
    """Sums kernels by kind, dtype and arithmetic intensity, or by size.

    A kernel takes the longer of its arithmetic and its traffic, which cannot be computed from a sum over different
    kernels; for kernels whose operations per byte differ by at most the square root of two, it is accurate enough.
    Likewise how much of its traffic a cache holds, where their bytes differ by at most a factor of two.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, tuple[int | None, bool]], tuple[Amounts, int, int]] = {}

    def add(self, work: KernelCost, times: int = 1) -> None:
        """Add `times` kernels of this cost."""
        key = work.kind, str(work.dtype).removeprefix("torch."), _size_class(work.amounts)
        amounts, kernels, calls = self._sums.get(key, (Amounts(0, 0), 0, 0))
        self._sums[key] = amounts.plus(work.amounts, times), kernels + times, calls + times * work.module_calls

    def workloads(self) -> tuple[KernelGroup, ...]:
        return tuple(
            KernelGroup(kind=kind, dtype=dtype, kernels=kernels, module_calls=calls, **amounts._asdict())
            for (kind, dtype, _), (amounts, kernels, calls) in self._sums.items()
        )


def _size_class(amounts: Amounts) -> tuple[int | None, bool]:
    """Operations per byte as a power of the square root of two; of memory traffic alone, bytes as a power of two.

    And whether addresses are computed by divisions.
    """
    return _power(amounts), amounts.divisions > 0


def _power(amounts: Amounts) -> int | None:
    if amounts.operations and amounts.traffic:
        return round(2 * math.log2(amounts.operations / amounts.traffic))
    return round(math.log2(amounts.traffic)) if amounts.traffic else None


@dataclass
class OpenLayerWork:
    """Work of one layer, or between layers (""); fields as in `LayerWork`, `waits` is its `host_waits`."""

    layer: str
    tally: KernelCounter = field(default_factory=KernelCounter)
    copied_in: int = 0
    holds: bool = False
    waits: bool = False

    def work(self) -> LayerWork:
        return LayerWork(
            layer=self.layer,
            work=self.tally.workloads(),
            copied_in=self.copied_in,
            holds=self.holds,
            host_waits=self.waits,
        )


@dataclass
class OpenBlockUse:
    """A block use in progress; `waiting` and `peak` are bytes of activations at its start and at its peak."""

    block: str
    waiting: int
    peak: int
    turns: list[OpenLayerWork] = field(default_factory=list)
    in_backward: bool = False
    # the layers inside feed-forwards that take their tokens in chunks, each with the path of its feed-forward
    chunked: Mapping[str, str] = field(default_factory=dict)

    @property
    def worked(self) -> bool:
        return bool(self.block or self.turns)

    def add(self, layer: str, work: KernelCost, live: int) -> None:
        """Record a kernel of `layer`, while `live` bytes of activations are on the device."""
        self._turn(layer).tally.add(work)
        self.peak = max(self.peak, live)

    def wait(self, layer: str, copied_in: int) -> None:
        """Record that the host waits for `layer` and all work before it, and for bytes that it copied from the host."""
        turn = self._turn(layer)
        turn.copied_in, turn.waits = copied_in, True

    def _turn(self, layer: str) -> OpenLayerWork:
        """Return where work of `layer` counts now.

        A feed-forward in chunks has the weights of all its layers on the device until it ends: each layer counts once,
        and what further chunks take counts for the last one.
        """
        if self.turns and self.turns[-1].layer == layer and not self.turns[-1].waits:
            return self.turns[-1]
        before = self._in_chunks(layer)
        if any(turn.layer == layer for turn in before):
            return before[0]
        for turn in before:
            turn.holds = True
        self.turns.append(OpenLayerWork(layer))
        return self.turns[-1]

    def _in_chunks(self, layer: str) -> list[OpenLayerWork]:
        """Return what ran in the feed-forward in chunks that `layer` is in, if that is running, the last first."""
        found: list[OpenLayerWork] = []
        for turn in reversed(self.turns if layer in self.chunked else ()):
            if turn.waits or (turn.layer and self.chunked.get(turn.layer) != self.chunked[layer]):
                break
            found += [turn] if turn.layer else []
        return found

    def later(self, more: int) -> OpenBlockUse:
        """Return the same use with `more` additional bytes of live activations."""
        return replace(self, waiting=self.waiting + more, peak=self.peak + more)

    def use(self) -> BlockUse:
        turns = tuple(each.work() for each in self.turns)
        return BlockUse(block=self.block, live_bytes_at_start=self.waiting, peak=self.peak, layer_work=turns)


@dataclass
class OpenCall:
    """A component call in progress."""

    component: str
    method: str
    inputs: tuple[Any, ...]
    segments: list[OpenBlockUse] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # blocks in progress, the innermost last
    layer: str = ""  # current layer
    kernels: int = 0
    in_backward: bool = False
    left_out_from: int | None = None  # block uses that had worked when it was known that others will not run
    forward_places: list[tuple[int, str, str]] = field(default_factory=list)  # sequence numbers, blocks and layers
    blocks_begun: int = 0
    outside: dict[str, int] = field(default_factory=dict)  # modules outside of blocks: `blocks_begun` when each began
    latents: Callable[[], torch.Tensor | None] = lambda: None  # its first large tensor, if that still exists …
    version: int = 0  # … and which version of it

    @classmethod
    def of(
        cls, component: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any = None
    ) -> OpenCall:
        """Return the call with these arguments; `kind` is what else tells it apart from others."""
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        latents = next((tensor for tensor in tensors if tensor.ndim >= 3 and not tensor.is_inference()), None)
        inputs = (*call_signature(args, kwargs), kind)
        if latents is None:
            return cls(component, method, inputs)
        return cls(component, method, inputs, latents=weakref.ref(latents), version=latents._version)

    def takes_latents_of(self, other: OpenCall) -> bool:
        """Whether both calls have the same latents, not written to in between."""
        own = self.latents()
        return own is not None and own is other.latents() and self.version == other.version

    def note_place(self, sequence_number: int) -> None:
        """Note that nodes of the graph from `sequence_number` on belong to the current block and layer."""
        if self.forward_places and self.forward_places[-1][0] == sequence_number:
            self.forward_places.pop()
        self.forward_places.append((sequence_number, self.segments[-1].block, self.layer))

    def forward_place(self, sequence_number: int) -> tuple[str, str]:
        """Return the block and the layer in which a node of the graph was made."""
        index = bisect.bisect_right(self.forward_places, sequence_number, key=lambda place: place[0])
        return self.forward_places[index - 1][1:] if index else ("", "")

    def begin_outside(self, path: str) -> None:
        """Note that a module outside of blocks begins."""
        self.outside.setdefault(path, self.blocks_begun)

    @property
    def after_blocks(self) -> tuple[str, ...]:
        """Modules outside of blocks that ran after the last block only."""
        return tuple(path for path, begun in self.outside.items() if begun == self.blocks_begun > 0)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.component, self.method, self.inputs


class OpenPhase:
    """The component calls of one phase; of equal ones (inputs and used blocks), that of the highest peak is kept.

    Of those, the last: a first call may fill caches, and test whether feed-forwards can work in chunks.
    """

    def __init__(self, name: str, began: int) -> None:
        self.name = name
        self.began = began  # index in the allocator's history
        self.peak = self.outside = 0
        self.between = KernelCounter()
        self._kinds: dict[Any, list[OpenBlockUse]] = {}
        self._backward_from: dict[Any, int | None] = {}
        self._left_out_from: dict[Any, int | None] = {}
        self._after_blocks: dict[Any, tuple[str, ...]] = {}
        self._last: dict[str, OpenCall | None] = {}  # the last call of each component, if it may have a second one
        self._is_second: dict[Any, list[bool]] = {}  # of each call of a kind, whether it is the second one of a step
        self._order: list[Any] = []

    def add(self, done: OpenCall, segments: list[OpenBlockUse]) -> None:
        kind = (*done.key, tuple(segment.block for segment in segments))
        backward = next((index for index, segment in enumerate(segments) if segment.in_backward), None)
        if kind not in self._kinds or _highest(segments) >= _highest(self._kinds[kind]):
            self._kinds[kind] = segments
            self._backward_from[kind] = backward
            known = self._left_out_from.get(kind)  # a repetition does not say it
            self._left_out_from[kind] = known if done.left_out_from is None else done.left_out_from
            self._after_blocks[kind] = done.after_blocks or self._after_blocks.get(kind, ())
        before = self._last.get(done.component)
        second = before is not None and done.takes_latents_of(before)
        self._last[done.component] = None if second else done
        self._is_second.setdefault(kind, []).append(second)
        self._order.append(kind)
        self.peak = max(self.peak, _highest(segments))

    def phase(self, blocks: dict[str, list[str]], allocator_bytes: int) -> Phase:
        """Return the Phase; `blocks` are by component, `allocator_bytes` those an allocator needs for activations."""
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
            allocator_bytes=allocator_bytes,
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
            component=component,
            method=method,
            runs=self._order.count(kind),
            peak=peak,
            block_uses=uses,
            backward_from=self._backward_from[kind],
            left_out_from=self._left_out_from[kind],
            after_blocks=self._after_blocks[kind],
            paired=self._is_second[kind] == [False, True] * (self._order.count(kind) // 2),
        )


def _highest(segments: list[OpenBlockUse]) -> int:
    return max((segment.peak for segment in segments), default=0)
