"""Which sizes among a network's inputs grow with a picture's height: of a call, the same call at twice the height.

Two recorded calls, of which one is for twice the height, show them: dimensions and numbers that are twice as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class DoubledInputs:
    """For each leaf of a call's arguments, the dimensions of a tensor that double, or whether a number does."""

    form: str  # of the arguments, as text
    leaves: tuple[tuple[int, ...] | bool, ...]

    @classmethod
    def of(cls, one: ComponentArguments, other: ComponentArguments) -> DoubledInputs:
        """Compare a call and the same call for twice the height. Raises UnsupportedGraph."""
        (leaves, form), (others, its) = one.flat(), other.flat()
        if str(form) != str(its):
            raise UnsupportedGraph(f"it takes {form} at one height and {its} at another")
        found = tuple(_doubled(a, b) for a, b in zip(leaves, others, strict=True))
        if not any(found):
            raise UnsupportedGraph("none of its arguments grows with the height")
        return cls(str(form), found)

    @classmethod
    def guesses(cls, call: ComponentArguments) -> Iterator[DoubledInputs]:
        """Yield what may grow with the height in `call`, by shapes alone, where no second call shows it.

        First the rows of all maps, (batch, channels, …, height, width); then tables of positions beside them, (tokens,
        width); then the tokens of a sequence, (batch, tokens, width), and whatever else has as many; then also one of
        the numbers into which these divide, such as the height in patches. A guess that does not fit the network is
        noticed when that is exported at both sizes; any that does gives the same numbers.
        """
        leaves, form = call.flat()
        maps = tuple(map(_rows_of_map, leaves))
        with_tables = tuple(map(_rows_of_map_or_table, leaves))
        if any(maps):
            yield cls(str(form), maps)
            if with_tables != maps:
                yield cls(str(form), with_tables)
        sequences = [x for x in leaves if isinstance(x, torch.Tensor) and x.ndim == 3 and x.is_floating_point()]
        if sequences:
            tokens = sequences[0].shape[1]
            dims = tuple(_dims_of(leaf, tokens) for leaf in leaves)
            yield cls(str(form), dims)
            for place, leaf in enumerate(leaves):
                if type(leaf) is int and leaf > 1 and tokens % leaf == 0:
                    yield cls(str(form), (*dims[:place], True, *dims[place + 1 :]))

    def double(self, call: ComponentArguments) -> tuple[list[Any], Any]:
        """Return the leaves and the form of `call` at twice the height, tensors as shapes on "meta"."""
        leaves, form = call.flat()
        if str(form) != self.form:
            raise UnsupportedGraph(f"it is called with {form}, not with {self.form} as in the recorded call")
        pairs = zip(leaves, self.leaves, strict=True)
        return [_grown(leaf, growing) for leaf, growing in pairs], form


def _rows_of_map(leaf: Any) -> tuple[int, ...]:
    return (leaf.ndim - 2,) if isinstance(leaf, torch.Tensor) and leaf.ndim >= 4 and leaf.shape[-2] > 1 else ()


def _rows_of_map_or_table(leaf: Any) -> tuple[int, ...]:
    is_table = isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.is_floating_point()
    return (0,) if is_table else _rows_of_map(leaf)


def _dims_of(leaf: Any, size: int) -> tuple[int, ...]:
    """Return which of the first two dimensions of a tensor, the last one excepted, have this size."""
    shape = leaf.shape[:2] if isinstance(leaf, torch.Tensor) else ()
    return tuple(dim for dim, length in enumerate(shape) if length == size and dim < leaf.ndim - 1)


def _doubled(one: Any, other: Any) -> tuple[int, ...] | bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.ndim != other.ndim:
            raise UnsupportedGraph(f"an argument has {one.ndim} dimensions at one height and {other.ndim} at another")
        differs = tuple(dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b)
        if any(other.shape[dim] != 2 * one.shape[dim] for dim in differs):
            raise UnsupportedGraph(f"an argument of {tuple(one.shape)} has {tuple(other.shape)} at twice the height")
        return differs
    if type(one) is int and type(other) is int and one != other:
        if other != 2 * one:
            raise UnsupportedGraph(f"an argument of {one} is {other} at twice the height")
        return True
    return ()


def _grown(leaf: Any, growing: tuple[int, ...] | bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        dims: Sequence[int] = growing if isinstance(growing, tuple) else ()
        shape = [2 * size if dim in dims else size for dim, size in enumerate(leaf.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    return 2 * leaf if growing is True else leaf


def rebuilt(leaves: Sequence[Any], form: Any) -> ComponentArguments:
    """Return the call whose flattened arguments these are."""
    args, kwargs = tree_unflatten(list(leaves), form)
    return ComponentArguments(args, kwargs)
