"""Networks that do not work every time: denoisers let the time pass that a pass took, encoders give what they gave."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tightfit.measure.module_equivalence import call_signature
from tightfit.measure.recorder import Moment, Recorder
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import free_dead_tensors, store_of

__all__ = ["CallReplayer", "PassReplayer"]

MOST_MOMENTS = 200  # of a pass, for the picture


@dataclass(frozen=True)
class _RecordedPass:
    """What one pass of a network did."""

    output: Any  # its tensors on "meta"
    nanoseconds: int
    above: int  # bytes that it took at its most, above what there was
    bytes_in: int
    bytes_out: int
    moments: tuple[Moment, ...]  # in seconds after its beginning


class PassReplayer:
    """`part.forward`, which from its third pass with the same inputs on only takes as long as its second did.

    (The first may make tables that the others find ready.) Where its weights stream, the first two passes fill what
    stays and the ring, and what is ahead at the end of one pass is missing from the next: there, the third and the
    fourth pass are worked through too, and repeated in turn.
    """

    def __init__(self, part: nn.Module, recorder: Recorder, card: SimulatedCard, *, streams: bool = False) -> None:
        self._forward: Callable[..., Any] = part.forward
        functools.update_wrapper(self, part.forward)  # pipelines ask for its signature
        self._recorder, self._card = recorder, card
        self._watched = (3, 4) if streams else (2,)
        self.forget()

    def vary(self, change: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack) -> None:
        """Until `undo` is closed, it works as `change` makes it."""
        undo.callback(vars(self).update, _forward=self._forward)
        self._forward = change(self._forward)

    def watch(self, number: int, undo: ExitStack) -> None:
        """Until `undo` is closed, the pass of this number is the one that is repeated from then on."""
        undo.callback(vars(self).update, _watched=self._watched)
        self._watched = (number,)

    def forget(self) -> None:
        """Another call begins: what it begins with is worked through again."""
        self._passes: Counter[Any] = Counter()
        self._known: dict[Any, list[_RecordedPass]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key, watched = call_signature(args, kwargs), self._watched
        self._passes[key] += 1
        number = self._passes[key]
        if number in watched:
            output, seen = _watched(lambda: self._forward(*args, **kwargs), self._recorder, self._card)
            self._known.setdefault(key, []).append(seen)
            return output
        if number < watched[0]:
            return self._forward(*args, **kwargs)
        return _repeat(self._known[key][(number - watched[0]) % len(watched)], self._recorder, self._card)


class CallReplayer:
    """`part.forward`, which in a pipeline's second call gives what it gave in the first, and does not work."""

    def __init__(self, part: nn.Module) -> None:
        self._forward: Callable[..., Any] = part.forward
        functools.update_wrapper(self, part.forward)  # pipelines ask for its signature
        self._passes: Counter[Any] = Counter()
        self._given: dict[Any, tuple[list[Callable[[], Any]], Any]] = {}
        self._again = False

    def again(self) -> None:
        """Another call begins."""
        self._passes.clear()
        self._again = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = call_signature(args, kwargs)
        self._passes[key] += 1
        place = key, self._passes[key]
        if place in self._given:
            layers, whole = self._given[place]
            return tree_unflatten([layer() for layer in layers], whole)
        output = self._forward(*args, **kwargs)
        layers, whole = tree_flatten(output)
        if not self._again and all(isinstance(layer, _PLAIN) for layer in layers):
            self._given[place] = [_copy_of(layer) for layer in layers], whole
        return output


_PLAIN = (torch.Tensor, bool, int, float, str, type(None))


def _copy_of(value: Any) -> Callable[[], Any]:
    """What makes `value` once more; of a tensor on a card whose numbers nobody knows, its layout."""
    if not isinstance(value, torch.Tensor) or value.device.type != NAME:
        return lambda: value
    device = value.device
    if store_of(value).values is not None:
        kept = value.detach().cpu()
        return lambda: kept.to(device)
    shape, strides, dtype = value.shape, value.stride(), value.dtype
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _repeat(seen: _RecordedPass, recorder: Recorder, card: SimulatedCard) -> Any:
    recorder.repeat(seen.moments)
    card.timeline.run(card.stream, "compute", seen.nanoseconds)
    card.live.reach(seen.above)
    recorder.moved(bytes_in=seen.bytes_in, bytes_out=seen.bytes_out)
    return _placed(seen.output, torch.device(NAME, card.index))


def _watched(work: Callable[[], Any], recorder: Recorder, card: SimulatedCard) -> tuple[Any, _RecordedPass]:
    free_dead_tensors()
    counter, begun, crossed = card.live, card.now, (card.bytes_in, card.bytes_out)
    moments: list[Moment] = []

    def watch(_: KernelCost) -> None:
        activations = max(counter.now - recorder.weights, 0)
        moments.append(Moment((card.now - begun) * 1e-9, recorder.weights, activations))

    before, highest = counter.now, counter.peak
    counter.reset_peak()
    card.watchers.append(watch)
    try:
        output = work()
    finally:
        card.watchers.remove(watch)
    above, counter.peak = counter.peak - before, max(counter.peak, highest)
    seen = _RecordedPass(
        _placed(output, torch.device("meta")),
        card.now - begun,
        above,
        card.bytes_in - crossed[0],
        card.bytes_out - crossed[1],
        _few(moments),
    )
    return output, seen


def _few(moments: list[Moment]) -> tuple[Moment, ...]:
    """The highest of each stretch of moments."""
    length = -(-len(moments) // MOST_MOMENTS) or 1
    segments = (moments[start : start + length] for start in range(0, len(moments), length))
    return tuple(max(segment, key=lambda moment: moment.total) for segment in segments)


def _placed(values: Any, device: torch.device) -> Any:
    """Tensors laid out as those in `values`, on `device`, with nothing in them."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    return tree_map(place, values)
