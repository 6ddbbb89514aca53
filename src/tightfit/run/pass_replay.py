"""Replacements of `forward` that replay earlier calls: time and bytes of denoisers, outputs of encoders."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tightfit.apply.activations.caches.component_cache import ComponentCache
from tightfit.measure.module_equivalence import call_signature
from tightfit.measure.recorder import Recorder
from tightfit.schema.results import Moment
from tightfit.simulator.backend import cards_in_use
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import free_dead_tensors, store_of

__all__ = ["CallReplayer", "PassReplayer"]

MOST_MOMENTS = 200  # moments kept of a call, for the timeline


@dataclass(frozen=True)
class _RecordedPass:
    """Measurements of one denoiser call."""

    output: Any  # its tensors on "meta"
    nanoseconds: int
    of_host: int  # nanoseconds of them in which the host works on the critical path
    above: int  # peak bytes above those at its start
    bytes_in: int  # host to device
    bytes_out: int  # device to host
    moments: tuple[Moment, ...]  # in seconds after its start


class PassReplayer:
    """`part.forward`, of which the third and later calls with the same signature replay the second.

    (The first may build tables that later calls reuse.) If its weights stream, the first two calls fill the resident
    layers and the ring buffer, and layers that one call prefetches at its end are not loaded in the next: then the
    third and fourth calls run too, and are replayed alternately.
    """

    def __init__(
        self,
        part: nn.Module,
        recorder: Recorder,
        card: SimulatedCard,
        *,
        streams: bool = False,
        call: Callable[..., Any] | None = None,
        cache: ComponentCache | None = None,
    ) -> None:
        """`call` is what runs instead of `part.forward`; `cache` is the step cache of `part`.

        What streams and has a step cache runs every time: what is loaded depends on the calls before.
        """
        self._forward: Callable[..., Any] = call or part.forward
        functools.update_wrapper(self, part.forward)  # pipelines inspect its signature
        self._recorder, self._card = recorder, card
        self._cache, self._always_runs = cache, cache is not None and streams
        self._watched = (3, 4) if streams else (2,)
        self.forget()

    def vary(self, change: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack) -> None:
        """Replace `forward` by `change(forward)` until `undo` is closed."""
        undo.callback(vars(self).update, _forward=self._forward)
        self._forward = change(self._forward)

    def watch(self, number: int, undo: ExitStack) -> None:
        """Measure call `number` (from 1) and replay it in later calls, until `undo` is closed."""
        undo.callback(vars(self).update, _watched=self._watched)
        self._watched = (number,)

    def forget(self) -> None:
        """Begin another call of the pipeline: the first denoiser calls run again."""
        self._passes: Counter[Any] = Counter()
        self._known: dict[Any, list[_RecordedPass]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._always_runs:
            return self._forward(*args, **kwargs)
        kind = self._cache.kind_of_next(args, kwargs) if self._cache is not None else None
        key, watched = (call_signature(args, kwargs), kind), self._watched
        self._passes[key] += 1
        number = self._passes[key]
        if number in watched:
            output, recorded = _watched(lambda: self._forward(*args, **kwargs), self._recorder, self._card)
            self._known.setdefault(key, []).append(recorded)
            return output
        if number < watched[0]:
            return self._forward(*args, **kwargs)
        if self._cache is not None:
            self._cache.repeated(args, kwargs)
        return _repeat(self._known[key][(number - watched[0]) % len(watched)], self._recorder, self._card)


class CallReplayer:
    """`part.forward`, which in later pipeline calls returns its outputs of the first without running."""

    def __init__(self, part: nn.Module) -> None:
        self._forward: Callable[..., Any] = part.forward
        functools.update_wrapper(self, part.forward)  # pipelines inspect its signature
        self._passes: Counter[Any] = Counter()
        self._given: dict[Any, tuple[list[Callable[[], Any]], Any]] = {}
        self._again = False

    def again(self) -> None:
        """Begin another call of the pipeline."""
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
        if not self._again:
            layers, whole = tree_flatten(output)
            if (copies := _copies_of(layers)) is not None:
                self._given[place] = copies, whole
        return output


_LIBRARIES = ("diffusers.", "transformers.")
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type, type(None))


def _copies_of(values: Sequence[Any]) -> list[Callable[[], Any]] | None:
    """Return a function for each value that makes it again; None if there is none for one of them."""
    copies = [copy for value in values if (copy := _copy_of(value)) is not None]
    return copies if len(copies) == len(values) else None


def _copy_of(value: Any) -> Callable[[], Any] | None:
    """Return a function that makes `value` again; None for other than tensors, plain values and objects of them.

    A tensor on a card without values is made with the same layout. A language model's keys and values are in objects.
    """
    if isinstance(value, _PLAIN):
        return lambda: value
    if not isinstance(value, torch.Tensor):
        return _copy_of_object(value)
    if value.device.type != NAME:
        return lambda: value
    device = value.device
    if store_of(value).values is not None:
        kept = value.detach().cpu()
        return lambda: kept.to(device)
    shape, strides, dtype = value.shape, value.stride(), value.dtype
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _copy_of_object(value: Any) -> Callable[[], Any] | None:
    """As `_copy_of`, for an object of the libraries that has only attributes; those may be in lists, say."""
    kind = type(value)
    slots = any(getattr(each, "__slots__", ()) for each in kind.__mro__)
    if slots or isinstance(value, nn.Module) or not kind.__module__.startswith(_LIBRARIES):
        return None
    layers, whole = tree_flatten(vars(value))
    copies = None if any(layer is value for layer in layers) else _copies_of(layers)
    if copies is None:
        return None

    def again() -> Any:
        made = object.__new__(kind)
        vars(made).update(tree_unflatten([copy() for copy in copies], whole))
        return made

    return again


def _repeat(recorded: _RecordedPass, recorder: Recorder, card: SimulatedCard) -> Any:
    recorder.repeat(recorded.moments)
    card.timeline.run(card.stream, "compute", recorded.nanoseconds, of_host=recorded.of_host)
    card.live.reach(recorded.above)
    recorder.moved(bytes_in=recorded.bytes_in, bytes_out=recorded.bytes_out)
    return _placed(recorded.output, torch.device(NAME, card.index))


def _watched(work: Callable[[], Any], recorder: Recorder, card: SimulatedCard) -> tuple[Any, _RecordedPass]:
    free_dead_tensors()
    counter, begun, crossed = card.live, card.end, (card.bytes_in, card.bytes_out)
    moments: list[Moment] = []

    def watch(_: KernelCost) -> None:
        activations = max(counter.now - recorder.weights, 0)
        moments.append(Moment((card.now - begun.now) * 1e-9, recorder.weights, activations))

    before, highest = counter.now, counter.peak
    counter.reset_peak()
    card.kernel_callbacks.append(watch)
    try:
        output = work()
    finally:
        card.kernel_callbacks.remove(watch)
    above, counter.peak = counter.peak - before, max(counter.peak, highest)
    end = max(each.end for each in (card, *_cards_of(output)))
    recorded = _RecordedPass(
        _placed(output, torch.device("meta")),
        end.now - begun.now,
        end.host - begun.host,
        above,
        card.bytes_in - crossed[0],
        card.bytes_out - crossed[1],
        _few(moments),
    )
    return output, recorded


def _cards_of(output: Any) -> list[SimulatedCard]:
    """Cards that tensors of `output` are on: that of a split network's last part, if it has not been moved yet."""
    devices = {leaf.device for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
    return [cards_in_use()[device.index] for device in devices if device.type == NAME]


def _few(moments: list[Moment]) -> tuple[Moment, ...]:
    """At most MOST_MOMENTS of `moments`: the one with the most bytes of each segment."""
    length = -(-len(moments) // MOST_MOMENTS) or 1
    segments = (moments[start : start + length] for start in range(0, len(moments), length))
    return tuple(max(segment, key=lambda moment: moment.total) for segment in segments)


def _placed(values: Any, device: torch.device) -> Any:
    """Replace the tensors in `values` by uninitialized ones on `device` with the same shape, strides and dtype."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    return tree_map(place, values)
