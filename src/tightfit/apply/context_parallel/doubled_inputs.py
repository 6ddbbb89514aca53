"""Which sizes among a network's inputs grow with a picture's height: of a call, the same call at twice the height.

Two recorded calls, of which one is for twice the height, show them: dimensions and numbers that are twice as large.
Where there are no such calls, shapes give a few guesses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.apply.activations.strips.row_axes import UnsupportedGraph

__all__ = ["ComponentArguments", "DoubledInputs"]


@dataclass(frozen=True)
class ComponentArguments:
    """Arguments of a call of a component; tensors may be on any device."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def flat(self) -> tuple[list[Any], Any]:
        return tree_flatten((self.args, dict(self.kwargs)))


class Growth(NamedTuple):
    """How an argument grows with the height: dimensions of a tensor, or a number."""

    doubled: tuple[int, ...] = ()  # dimensions
    joined: tuple[int, ...] = ()  # dimensions that grow by as much as the sequence does: those of text and picture
    number: bool = False  # whether it is a number that doubles


SAME = Growth()


@dataclass(frozen=True)
class DoubledInputs:
    """How each leaf of a call's arguments grows with the height."""

    form: str  # of the arguments, as text
    leaves: tuple[Growth, ...]

    @classmethod
    def of(cls, one: ComponentArguments, other: ComponentArguments) -> DoubledInputs:
        """Compare a call and the same call for twice the height. Raises UnsupportedGraph."""
        (leaves, form), (others, its) = one.flat(), other.flat()
        if str(form) != str(its):
            raise UnsupportedGraph(f"it takes {form} at one height and {its} at another")
        pairs = list(zip(leaves, others, strict=True))
        tokens = next((rows for a, b in pairs for rows in _doubled_sizes(a, b)), 0)
        found = tuple(_growth(a, b, tokens) for a, b in pairs)
        if not any(each != SAME for each in found):
            raise UnsupportedGraph("none of its arguments grows with the height")
        return cls(str(form), found)

    @classmethod
    def guesses(cls, call: ComponentArguments) -> Iterator[DoubledInputs]:
        """Yield what may grow with the height in `call`, by shapes alone, where no second call shows it.

        First the rows of all maps, (batch, channels, …, height, width); then tables of positions beside them, (tokens,
        width); then the tokens of a sequence, (batch, tokens, width), and whatever else has as many, or as many as it
        and another sequence together, without and with vectors of one number for each token, (batch, tokens); then also
        one of the numbers into which they divide, such as the height in patches. A guess that does not fit the network
        is noticed when that is exported at both sizes; any that does gives the same numbers.
        """
        leaves, form = call.flat()
        maps = tuple(map(_map_growth, leaves))
        with_tables = tuple(map(_map_or_table_growth, leaves))
        if any(each != SAME for each in maps):
            yield cls(str(form), maps)
            if with_tables != maps:
                yield cls(str(form), with_tables)
        sequences = [x for x in leaves if isinstance(x, torch.Tensor) and x.ndim == 3 and x.is_floating_point()]
        if sequences:
            tokens, *lengths = (each.shape[1] for each in sequences)
            places = [i for i, leaf in enumerate(leaves) if type(leaf) is int and leaf > 1 and tokens % leaf == 0]
            plain = tuple(_sequence_growth(leaf, tokens, lengths) for leaf in leaves)
            with_vectors = tuple(map(partial(_vector_growth, tokens), leaves, plain))
            for found in dict.fromkeys((plain, with_vectors)):
                yield cls(str(form), found)
                for place in places:
                    yield cls(str(form), (*found[:place], Growth(number=True), *found[place + 1 :]))

    def double(self, call: ComponentArguments) -> tuple[list[Any], Any]:
        """Return the leaves and the form of `call` at twice the height, tensors as shapes on "meta"."""
        leaves, form = call.flat()
        if str(form) != self.form:
            raise UnsupportedGraph(f"it is called with {form}, not with {self.form} as in the recorded call")
        pairs = list(zip(leaves, self.leaves, strict=True))
        tokens = next((leaf.shape[dim] for leaf, growth in pairs for dim in growth.doubled), 0)
        return [_grown(leaf, growth, tokens) for leaf, growth in pairs], form


def _doubled_sizes(one: Any, other: Any) -> list[int]:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.ndim != other.ndim:
        return []
    return [a for a, b in zip(one.shape, other.shape, strict=True) if b == 2 * a]


def _growth(one: Any, other: Any, tokens: int) -> Growth:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.ndim != other.ndim:
            raise UnsupportedGraph(f"an argument has {one.ndim} dimensions at one height and {other.ndim} at another")
        sizes = enumerate(zip(one.shape, other.shape, strict=True))
        differs = [(dim, b == 2 * a, b == a + tokens) for dim, (a, b) in sizes if a != b]
        if not all(doubled or joined for _, doubled, joined in differs):
            raise UnsupportedGraph(f"an argument of {tuple(one.shape)} has {tuple(other.shape)} at twice the height")
        return Growth(
            tuple(dim for dim, doubled, _ in differs if doubled),
            tuple(dim for dim, doubled, _ in differs if not doubled),
        )
    if type(one) is int and type(other) is int and one != other:
        if other != 2 * one:
            raise UnsupportedGraph(f"an argument of {one} is {other} at twice the height")
        return Growth(number=True)
    return SAME


def _map_growth(leaf: Any) -> Growth:
    is_map = isinstance(leaf, torch.Tensor) and leaf.ndim >= 4 and leaf.shape[-2] > 1
    return Growth((leaf.ndim - 2,)) if is_map else SAME


def _map_or_table_growth(leaf: Any) -> Growth:
    is_table = isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.is_floating_point()
    return Growth((0,)) if is_table else _map_growth(leaf)


def _sequence_growth(leaf: Any, tokens: int, lengths: Collection[int]) -> Growth:
    """Return which dimensions are of the sequence of so many `tokens`, or of it and of another one of `lengths`."""
    shape = list(enumerate(leaf.shape)) if isinstance(leaf, torch.Tensor) else []
    doubled = tuple(dim for dim, size in shape[:2] if size == tokens and dim < leaf.ndim - 1)
    masks = [] if doubled or len(shape) == 3 else shape[1:]
    return Growth(doubled, tuple(dim for dim, size in masks if size - tokens in lengths))


def _vector_growth(tokens: int, leaf: Any, growth: Growth) -> Growth:
    is_vector = isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.shape[1] == tokens
    return Growth((1,)) if is_vector else growth


def _grown(leaf: Any, growth: Growth, tokens: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        more = {dim: leaf.shape[dim] for dim in growth.doubled} | dict.fromkeys(growth.joined, tokens)
        shape = [size + more.get(dim, 0) for dim, size in enumerate(leaf.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    return 2 * leaf if growth.number else leaf


def rebuilt(leaves: Sequence[Any], form: Any) -> ComponentArguments:
    """Return the call whose flattened arguments these are."""
    args, kwargs = tree_unflatten(list(leaves), form)
    return ComponentArguments(args, kwargs)
