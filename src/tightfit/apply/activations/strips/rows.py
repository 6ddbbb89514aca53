"""Which rows of its arguments an operation needs for some rows of its output, and how it computes these.

There is one rule for each kind of operation, in `op_rules.py`; without a rule, an operation is computed whole, which is
always correct.
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
    """Rows from `lo` to `hi`, without `hi`."""

    lo: int
    hi: int

    def within(self, rows: int) -> Span:
        return Span(min(max(self.lo, 0), rows), min(max(self.hi, 0), rows))


Sources = Sequence[Node]
Needs = Callable[[Span], Span]


class RowSlice(NamedTuple):
    """An argument as an operation gets it: the rows `span` of it, or all of it if it has no rows."""

    tensor: torch.Tensor
    span: Span


@dataclass(frozen=True)
class Rule:
    """An operation by rows.

    `needs[i]` maps rows of the output to the rows of the i-th argument that they depend on, in coordinates that may
    exceed its borders; None: all of it, or it has no rows. With `statistics`, the first argument is taken by rows once
    the statistics of all its rows are known. `make` takes the arguments and the wanted rows of the output; with `makes`
    (it creates a tensor without taking any), the last argument is one on the right device.
    """

    needs: tuple[Needs | None, ...]
    make: Callable[[Sequence[RowSlice], Span], torch.Tensor]
    statistics: bool = False
    makes: bool = False


def same(span: Span) -> Span:
    return span


def caller(node: Node, **changed: Any) -> Callable[[Sequence[RowSlice]], torch.Tensor]:
    """Return a function that runs `node`'s operation on tensors in place of its references.

    Its other arguments are unchanged, except for the keyword arguments `changed`.
    """
    function, args, kwargs = node.function, node.args, node.kwargs | changed
    flat = [place for place, value in enumerate(args) if isinstance(value, Ref)]
    if len(flat) == len(node.sources):  # nearly always: no reference is nested

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
    """Return the rows `wanted` of a tensor that has the rows `has`."""
    if has == wanted:
        return tensor
    return tensor.narrow(axis, wanted.lo - has.lo, wanted.hi - wanted.lo)


def padded(tensor: torch.Tensor, axis: int, before: int, after: int, value: float = 0.0) -> torch.Tensor:
    """Return `tensor` with rows of `value` added before and after."""
    if not (before or after):
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - axis) + [before, after], value=value)


def times(span: Span, factor: int) -> Span:
    return Span(span.lo * factor, span.hi * factor)


def covering(span: Span, factor: int) -> Span:
    """Return the fewest rows that cover `span` when each becomes `factor` rows."""
    return Span(span.lo // factor, -(-span.hi // factor))


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return a node's argument at a place of its operator's arguments, or by name."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def beside(dims: Callable[[Node, Node], set[int]]) -> Callable[[Node, Sources], Rule | None]:
    """Return rules for operations along `dims` of each argument: by rows if the rows are another dimension."""

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
    """Along no dimension: dimensions are moved, added or removed, and the shapes show where the rows are."""
    return set()
