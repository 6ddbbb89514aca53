"""Classifier-free guidance in one call: a step's two calls of a denoiser become one call with twice the batch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from tightfit.apply.activations.max_batch import Batch, find_batch, in_chunks, why_not_split
from tightfit.apply.activations.outputs import agree, are_equal, combine
from tightfit.schema.plan import ComponentPlan

__all__ = ["batch_cfg_calls", "batch_or_split"]


SMALL = 4096  # elements; tensors up to this size are compared by value (timesteps, position tables)
TOLERANCE = 2.0**-5  # relative to the largest number: above bfloat16 rounding in a whole network
MOST_KNOWN = 16  # cached pairs of equal tensors
MISSES = 3  # wrong predictions, after which none is made any more


def batch_or_split(module: nn.Module, plan: ComponentPlan, note: Callable[[str], object]) -> dict[str, Any]:
    """Return the methods of `module` that split batches or join calls, by name, if the plan asks for that.

    It is `forward`, so that hooks of the user see each call once and whole; `__call__` where torch does not use the
    class's `forward`, or compiles it. Calls of a split network are joined in `__call__`, which returns what came back
    from the last device.
    """
    around = "forward" in vars(module) or module._compiled_call_impl is not None
    name = "__call__" if around else "forward"
    methods: dict[str, Any] = {}
    if plan.splits_batch and plan.placement != "stream":
        methods[name] = in_chunks(getattr(type(module), name), plan.max_batch, note)
    if plan.cfg == "batched":
        name = "__call__" if plan.split else name
        methods[name] = batch_cfg_calls(methods.get(name, getattr(type(module), name)), note)
    return methods


def batch_cfg_calls(
    forward: Callable[..., Any], note: Callable[[str], object] = lambda what: None
) -> Callable[..., Any]:
    """Wrap `forward` (network first) to run two calls as one where they are predicted to be the two calls of a step.

    Results are equal up to rounding; activations are those of twice the batch. `note` is called with a sentence where
    the two calls of a step cannot be batched.
    """
    pairs = _Pairs(note)

    @functools.wraps(forward)
    def run(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = _call_of(network, args, kwargs)
        if call is None:
            pairs.forget()
            return forward(network, *args, **kwargs)
        return pairs.answer(call, functools.partial(forward, network))

    return run


@dataclass(frozen=True)
class _Call:
    """Flattened arguments of a network call."""

    batch: Batch
    leaves: list[Any]
    spec: TreeSpec

    @property
    def given(self) -> tuple[Any, Any]:
        """Positional and keyword arguments."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    @property
    def plain(self) -> list[Any]:
        """Flattened arguments, with None in place of tensors."""
        return [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        return {index: leaf for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    @property
    def along(self) -> list[Any]:
        """Arguments that belong to the items."""
        found: list[Any] = []
        self.batch.map(lambda value, dim, rows: found.append(value), *self.given)
        return found

    def run(self, forward: Callable[..., Any]) -> Any:
        args, kwargs = self.given
        return forward(*args, **kwargs)

    def with_other(self, other: _Call) -> _Call:
        """Return one call for the items of both calls, this one's first."""
        others = iter(other.along)

        def both(value: Any, dim: int, rows: int) -> Any:
            return value + next(others) if isinstance(value, list) else torch.cat((value, next(others)), dim)

        return _Call(self.batch, *tree_flatten(self.batch.map(both, *self.given)))


def _call_of(network: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call | None:
    """Return the call, or None if its result may depend on something unknown."""
    batch = find_batch(network, args, kwargs)
    if batch is None or network.training or why_not_split(network, batch, args, kwargs) is not None:
        return None
    call = _Call(batch, *tree_flatten((list(args), kwargs)))
    if any(tensor.is_inference() for tensor in call.tensors.values()):  # they have no version counter
        return None
    return call


class _Seen:
    """A tensor at its current version, to be recognized later if unchanged.

    Only small ones are kept alive: pipelines make a new timestep tensor for each call.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor) if tensor.numel() > SMALL else lambda: tensor
        self._version = tensor._version

    def now(self) -> torch.Tensor | None:
        """Return the tensor, or None if it was freed or changed."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor._version == self._version else None


class _Past:
    """A past call and its result."""

    def __init__(self, call: _Call, answer: Any) -> None:
        self.plain, self.spec = call.plain, call.spec
        self._tensors = {index: _Seen(tensor) for index, tensor in call.tensors.items()}
        self._answer = [_Seen(tensor) for tensor in _tensors(answer)]

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return its input tensors that still exist unchanged, by index."""
        now = {index: seen.now() for index, seen in self._tensors.items()}
        return {index: tensor for index, tensor in now.items() if tensor is not None}

    def answer(self) -> list[torch.Tensor] | None:
        now = [seen.now() for seen in self._answer]
        left = [tensor for tensor in now if tensor is not None]
        return left if len(left) == len(now) else None


@dataclass
class _Pair:
    """The two calls of a step: tensors that differ between them, by index. All other arguments are shared."""

    plain: list[Any]
    spec: TreeSpec
    own: dict[int, tuple[_Seen, _Seen]]

    def second_of(self, first: _Call) -> _Call | None:
        """Return the call that should follow `first`; None if `first` is not the first call of this pair."""
        if self.spec != first.spec or self.plain != first.plain:
            return None
        leaves = list(first.leaves)
        for index, (one, other) in self.own.items():
            known, follows = one.now(), other.now()
            if known is not leaves[index] or follows is None or len(known) % first.batch.count:
                return None
            leaves[index] = follows
        return _Call(first.batch, leaves, first.spec)


class _Equals:
    """Cache of small tensors with equal values, valid as long as both exist unchanged.

    Comparing tensors on a card makes the host wait for it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[_Seen, _Seen]] = {}

    def __call__(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        seen = self._known.get((id(one), id(other)), ())
        if seen and all(each.now() is tensor for each, tensor in zip(seen, (one, other), strict=True)):
            return True
        if not _equal(one, other):
            return False
        if len(self._known) >= MOST_KNOWN:
            self._known.pop(next(iter(self._known)))
        self._known[id(one), id(other)] = _Seen(one), _Seen(other)
        return True


class _Kept:
    """The result of a predicted call."""

    def __init__(self, call: _Call, answer: Any) -> None:
        self.answer = answer
        self._plain, self._spec = call.plain, call.spec
        self._tensors = {index: (tensor, tensor._version) for index, tensor in call.tensors.items()}

    def is_for(self, call: _Call, equals: _Equals) -> bool:
        """Whether it is the result of `call`."""
        if self._spec != call.spec or self._plain != call.plain:
            return False
        given = call.tensors
        return all(
            tensor._version == version and (given[index] is tensor or equals(given[index], tensor))
            for index, (tensor, version) in self._tensors.items()
        )


class _Pairs:
    """Observed and predicted calls of one network."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._misses = 0
        self.forget()

    def forget(self) -> None:
        self._last: _Past | None = None
        self._pair: _Pair | None = None
        self._kept: _Kept | None = None
        self._equals = _Equals()

    def answer(self, call: _Call, forward: Callable[..., Any]) -> Any:
        """Return what `forward` returns for `call`."""
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept.is_for(call, self._equals):
                return kept.answer
            self._pair, self._misses = None, self._misses + 1
        second = self._pair.second_of(call) if self._pair is not None else None
        if second is not None:
            first_half, second_half = _halves(call.with_other(second).run(forward))
            self._kept, self._last = _Kept(second, second_half), None
            return first_half
        answer = call.run(forward)
        past, self._last = self._last, _Past(call, answer)
        if past is not None and self._misses < MISSES:
            self._pair = self._tried(past, call, answer, forward) or self._pair
        return answer

    def _tried(self, past: _Past, call: _Call, answer: Any, forward: Callable[..., Any]) -> _Pair | None:
        """Return the two calls as a pair if they are the two calls of a step and give the same results as one."""
        before, given = past.tensors(), call.tensors
        same_latents = any(tensor is call.batch.first for tensor in before.values())
        if not same_latents or past.spec != call.spec or past.plain != call.plain or before.keys() != given.keys():
            return None
        differ = [index for index in given if before[index] is not given[index]]
        fits = all(before[index].shape == given[index].shape for index in differ)  # first: values may need a sync
        own = {i: (before[i], given[i]) for i in differ if fits and not _equal(before[i], given[i])}
        along = set(map(id, call.along))
        if not fits or any(id(other) not in along for _, other in own.values()):
            self._note("cfg: the two calls of a step take prompts of different sizes, and are made one by one")
            return None
        alone = past.answer()
        if not own or alone is None:
            return None
        first = _Call(call.batch, [before.get(index, leaf) for index, leaf in enumerate(call.leaves)], call.spec)
        halves = _halves(first.with_other(call).run(forward))
        if not (_close(_tensors(halves[0]), alone) and _close(_tensors(halves[1]), _tensors(answer))):
            self._misses = MISSES
            self._note("cfg: the two calls of a step gave other numbers as one, and are made one by one")
            return None
        return _Pair(call.plain, call.spec, {index: (_Seen(one), _Seen(two)) for index, (one, two) in own.items()})


def _halves(output: Any) -> tuple[Any, Any]:
    """Split the output of a call for the items of two calls into one output each."""
    first = combine([output], lambda made: made[0][: len(made[0]) // 2])
    return first, combine([output], lambda made: made[0][len(made[0]) // 2 :])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are small and equal."""
    return one.numel() <= SMALL and are_equal(one, other)


def _close(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal up to rounding."""
    pairs = zip(values, others, strict=True)
    return len(values) == len(others) and all(agree(value, other, TOLERANCE) for value, other in pairs)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
