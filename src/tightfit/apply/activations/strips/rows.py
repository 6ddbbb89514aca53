"""Which rows of its arguments an operation needs for some rows of its output, and how it makes them.

One rule for each kind of operation, found in `rules.py`; what no rule knows is done whole, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tightfit.apply.activations.strips.program import Node, Ref, replace_refs

__all__ = [
    "Needs",
    "RowSlice",
    "Rule",
    "Sources",
    "Span",
    "argument",
    "beside",
    "caller",
    "covering",
    "crop",
    "nowhere",
    "padded",
    "same",
    "times",
]


class Span(NamedTuple):
    """Rows `lo` to `hi`, without `hi`."""

    lo: int
    hi: int

    def within(self, rows: int) -> Span:
        return Span(min(max(self.lo, 0), rows), min(max(self.hi, 0), rows))


Sources = Sequence[Node]
Needs = Callable[[Span], Span]


class RowSlice(NamedTuple):
    """An argument as an operation gets it: these rows of it; all of it where it has no rows."""

    tensor: torch.Tensor
    span: Span


@dataclass(frozen=True)
class Rule:
    """An operation row by row.

    `needs[i]` tells for rows of the output which rows of the i-th argument they are made of, in coordinates that may
    reach beyond its borders; None: all of it, or it has no rows. With `statistics` the first argument is taken row by
    row once the statistics of all its rows are known. `make` gets the arguments and the rows that are wanted; what
    `makes` a tensor of none gets one on the right device as the last argument.
    """

    needs: tuple[Needs | None, ...]
    make: Callable[[Sequence[RowSlice], Span], torch.Tensor]
    statistics: bool = False
    makes: bool = False


def same(span: Span) -> Span:
    return span


def caller(node: Node, **changed: Any) -> Callable[[Sequence[RowSlice]], torch.Tensor]:
    """Runs the operation of `node` on tensors in place of its references, its other arguments as they are."""
    function, args, kwargs = node.function, node.args, node.kwargs | changed
    flat = [place for place, value in enumerate(args) if isinstance(value, Ref)]
    if len(flat) == len(node.sources):  # as nearly always: no reference lies deeper

        def run(pieces: Sequence[RowSlice]) -> torch.Tensor:
            own = list(args)
            for place, piece in zip(flat, pieces, strict=True):
                own[place] = piece.tensor
            return function(*own, **kwargs)  # type: ignore[no-any-return]

        return run

    def run_nested(pieces: Sequence[RowSlice]) -> torch.Tensor:
        left = iter(pieces)
        own, named = replace_refs((args, kwargs), lambda _: next(left).tensor)
        return function(*own, **named)  # type: ignore[no-any-return]

    return run_nested


def crop(tensor: torch.Tensor, axis: int, has: Span, wanted: Span) -> torch.Tensor:
    """Of a tensor with the rows `has` those that are `wanted`."""
    if has == wanted:
        return tensor
    return tensor.narrow(axis, wanted.lo - has.lo, wanted.hi - wanted.lo)


def padded(tensor: torch.Tensor, axis: int, before: int, after: int, value: float = 0.0) -> torch.Tensor:
    """`tensor` with rows of `value` put before and after."""
    if not (before or after):
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - axis) + [before, after], value=value)


def times(span: Span, factor: int) -> Span:
    return Span(span.lo * factor, span.hi * factor)


def covering(span: Span, factor: int) -> Span:
    """The rows of which `factor` times as many cover `span`."""
    return Span(span.lo // factor, -(-span.hi // factor))


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """What a node was given at a place of its operator's arguments, or by name."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def beside(dims: Callable[[Node, Node], set[int]]) -> Callable[[Node, Sources], Rule | None]:
    """For operations that work along `dims` of each argument: row by row where that is another dimension."""

    def find(node: Node, sources: Sources) -> Rule | None:
        if node.varying:
            return None
        for source in sources:
            if source.axis is not None and (source.axis in dims(node, source) or source.rows != node.rows):
                return None
        run = caller(node)
        return Rule(tuple(same if x.axis is not None else None for x in sources), lambda pieces, span: run(pieces))

    return find


def nowhere(node: Node, source: Node) -> set[int]:
    """Along no dimension: they are moved, added or taken away, and where rows went the shapes tell."""
    return set()
