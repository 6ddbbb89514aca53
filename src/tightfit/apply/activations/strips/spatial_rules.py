"""Rules of operations that read neighbouring rows or change the number of rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import (
    RowSlice,
    Rule,
    Sources,
    Span,
    argument,
    beside,
    caller,
    covering,
    crop,
    nowhere,
    padded,
    same,
    times,
)

__all__ = [
    "PADS", "concatenated", "convolution", "interleaved", "nearest", "pad", "pool", "rows_padded", "scattered",
    "shuffle", "transposed",
]  # fmt: skip

PADS = ("pad", "constant_pad_nd")


def _window(span: Span, kernel: int, stride: int, dilation: int, padding: int) -> Span:
    return Span(span.lo * stride - padding, (span.hi - 1) * stride - padding + dilation * (kernel - 1) + 1)


def convolution(node: Node, sources: Sources) -> Rule | None:
    """The rows that its kernel reaches; they are padded at the true borders only."""
    data, weight = sources[0], sources[1]
    axis = node.axis
    spatial = len(weight.shape) - 2
    if data.axis != axis or axis is None:
        return None
    if axis == 0 and not node.varying:  # rows are items of a batch here
        return beside(nowhere)(node, sources)
    if axis < len(node.shape) - spatial:
        return None
    place = axis - (len(node.shape) - spatial)
    stride, padding, dilation = (
        _each(argument(node, 3 + i, name, default), spatial)
        for i, (name, default) in enumerate((("stride", 1), ("padding", 0), ("dilation", 1)))
    )
    if any(isinstance(value, str) for value in padding):
        return None
    kernel = weight.shape[2 + place]
    inner = [0 if i == place else value for i, value in enumerate(padding)]
    groups = argument(node, 6, "groups", 1)
    function, rows, biased = node.function, data.rows, len(sources) > 2

    def needs(span: Span) -> Span:
        return _window(span, kernel, stride[place], dilation[place], padding[place])

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        tensor, weight = pieces[0].tensor, pieces[1].tensor
        bias = pieces[2].tensor if biased else None
        reach, beyond = needs(span), padding[place]
        above, below = max(-reach.lo, 0), max(reach.hi - rows, 0)
        before = beyond if above == 0 else 0  # surplus rows of padding before the first wanted row
        if not (above or below):
            return function(tensor, weight, bias, stride, inner, dilation, groups)  # type: ignore[no-any-return]
        if above not in (0, beyond) or below > beyond or before % stride[place]:
            tensor = padded(tensor, axis, above, below)
            return function(tensor, weight, bias, stride, inner, dilation, groups)  # type: ignore[no-any-return]
        made = function(tensor, weight, bias, stride, padding, dilation, groups)  # pads without a copy, and too much
        return made.narrow(axis, before // stride[place], span.hi - span.lo)  # type: ignore[no-any-return]

    return Rule((needs, *(None for _ in sources[1:])), make)


def transposed(node: Node, sources: Sources) -> Rule | None:
    """Transposed convolution: a row of the argument contributes to several rows of the output."""
    data, weight, axis = sources[0], sources[1], node.axis
    spatial = len(weight.shape) - 2
    if axis is None or data.axis != axis or axis < len(node.shape) - spatial:
        return None
    place = axis - (len(node.shape) - spatial)
    stride, padding, outer, dilation = (
        _each(argument(node, at, name, default), spatial)
        for at, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
    )
    reach, step, pad = dilation[place] * (weight.shape[2 + place] - 1), stride[place], padding[place]
    inner, beyond = ([0 if i == place else v for i, v in enumerate(values)] for values in (padding, outer))
    groups, function, biased = argument(node, 6, "groups", 1), node.function, len(sources) > 2

    def needs(span: Span) -> Span:
        return Span(-(-(span.lo + pad - reach) // step), (span.hi - 1 + pad) // step + 1)

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        (tensor, has), bias = pieces[0], pieces[2].tensor if biased else None
        made = function(tensor, pieces[1].tensor, bias, stride, inner, beyond, groups, dilation)
        first = has.lo * step - pad
        last = first + made.shape[axis]
        made = crop(made, axis, Span(first, last), Span(max(first, span.lo), min(last, span.hi)))
        return padded(made, axis, 0, span.hi - last) if last < span.hi else made

    return Rule((needs, *(None for _ in sources[1:])), make)


def _each(value: Any, count: int) -> list[Any]:
    listed = list(value) if isinstance(value, list | tuple) else [value]
    return listed * count if len(listed) == 1 else listed


def pool(node: Node, sources: Sources) -> Rule | None:
    """Pooling without padding."""
    source, axis = sources[0], node.axis
    spatial = int(node.op.partition("pool")[2][0])
    kernel = _each(argument(node, 1, "kernel_size"), spatial)
    stride = _each(argument(node, 2, "stride") or kernel, spatial)
    padding, ceil = _each(argument(node, 3, "padding", 0), spatial), argument(node, 4, "ceil_mode", False)
    if axis is not None and axis < len(node.shape) - spatial:
        return beside(nowhere)(node, sources)
    if axis is None or source.axis != axis or any(padding) or ceil or node.varying:
        return None
    place, run = axis - (len(node.shape) - spatial), caller(node)
    return Rule((lambda s: _window(s, kernel[place], stride[place], 1, 0),), lambda pieces, span: run(pieces))


def rows_padded(node: Node) -> int:
    """Return how many rows a node adds or removes at both borders, if it is a pad; else 0.

    Farther from the borders than that, it does the same with any rows.
    """
    return sum(map(abs, _pads(node)[1])) if node.word in PADS and node.axis is not None else 0


def _pads(node: Node) -> tuple[int, list[int]]:
    """Return where a pad's arguments say how many rows it adds, and these: before and after; [] if none."""
    at = 2 * (len(node.shape) - 1 - (node.axis or 0))
    return at, list(node.args[1])[at : at + 2]


def pad(node: Node, sources: Sources) -> Rule | None:
    source, axis = sources[0], node.axis
    assert axis is not None
    if source.axis != axis:
        return None
    pads = list(node.args[1])
    at, own_pads = _pads(node)
    before = own_pads[0] if own_pads else 0
    named = node.op == "aten.pad.default"
    mode = argument(node, 2, "mode", "constant") if named else "constant"
    value = argument(node, 3, "value") if named else argument(node, 2, "value", 0)
    rows = source.rows
    if mode not in ("constant", "replicate", "reflect"):
        return None

    def origin(row: int) -> int:
        """Return the row of the argument that the output's `row` copies; for constants it may be outside."""
        row -= before
        if mode == "replicate":
            return min(max(row, 0), rows - 1)
        return row if mode == "constant" else rows - 1 - abs(rows - 1 - abs(row))

    def needs(span: Span) -> Span:
        if mode == "constant" or (before <= span.lo and span.hi <= before + rows):
            return Span(span.lo - before, span.hi - before)
        origins = [origin(row) for row in range(span.lo, span.hi)]
        return Span(min(origins), max(origins) + 1)

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        tensor, has = pieces[0]
        height, inside = span.hi - span.lo, has.hi - has.lo
        above = min(max(before - span.lo, 0), height)
        below = min(max(span.hi - before - rows, 0), height)
        if above + inside + below != height:  # border rows copy rows that are not all wanted themselves
            order = [origin(row) - has.lo for row in range(span.lo, span.hi)]
            tensor, above, below = tensor.index_select(axis, torch.tensor(order, device=tensor.device)), 0, 0
        own = [*pads[:at], above, below, *pads[at + 2 :]] if at < len(pads) else pads
        return torch.ops.aten.pad.default(tensor, own, mode, value) if any(own) else tensor

    return Rule((needs,), make)


def nearest(node: Node, sources: Sources) -> Rule | None:
    """Nearest upsampling: each row is repeated."""
    source, axis = sources[0], node.axis
    if axis is None or source.axis != axis or node.rows % source.rows or axis < 2:
        return None
    if any(big % small for big, small in zip(node.shape[2:], source.shape[2:], strict=True)):
        return None
    factor, size, function = node.rows // source.rows, list(node.shape[2:]), node.function

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        tensor, has = pieces[0]
        own = [(has.hi - has.lo) * factor if i == axis - 2 else side for i, side in enumerate(size)]
        return crop(function(tensor, own, None), axis, times(has, factor), span)

    return Rule((lambda span: covering(span, factor),), make)


def shuffle(node: Node, sources: Sources) -> Rule | None:
    """Pixel shuffle, from channels to pixels, and unshuffle."""
    source, axis, factor = sources[0], node.axis, node.args[1]
    if source.axis != axis or axis != len(node.shape) - 2:
        return None
    run = caller(node)
    if "unshuffle" in node.op:
        return Rule((lambda span: times(span, factor),), lambda pieces, span: run(pieces))
    return Rule(
        (lambda span: covering(span, factor),),
        lambda pieces, span: crop(run(pieces), axis, times(pieces[0].span, factor), span),
    )


def interleaved(node: Node, sources: Sources) -> Rule | None:
    """repeat_interleave; along the rows it is like nearest upsampling."""
    source, factor, dim = sources[0], node.args[1], argument(node, 2, "dim")
    if source.axis is None or (dim is None and len(source.shape) > 1):
        return None
    dim, run, axis = (dim or 0) % len(source.shape), caller(node, output_size=None), source.axis
    if dim != axis:
        return Rule((same,), lambda pieces, span: run(pieces))
    return Rule(
        (lambda span: covering(span, factor),),
        lambda pieces, span: crop(run(pieces), axis, times(pieces[0].span, factor), span),
    )


def concatenated(node: Node, sources: Sources) -> Rule | None:
    """Along the rows, each argument has some of them; along another dimension, each has all."""
    dim = argument(node, 1, "dim", 0) % len(node.shape)
    if dim != node.axis:
        return beside(lambda node, source: {dim})(node, sources)
    if any(source.axis not in (None, dim) for source in sources):
        return None
    sizes = [source.shape[dim] for source in sources]
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]

    def part(place: int, span: Span) -> Span:
        return Span(span.lo - firsts[place], span.hi - firsts[place]).within(sizes[place])

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        parts = []
        for place, (piece, source) in enumerate(zip(pieces, sources, strict=True)):
            wanted = part(place, span)
            has = Span(0, sizes[place]) if source.axis is None else piece.span
            if wanted.lo < wanted.hi:
                parts.append(crop(piece.tensor, dim, has, wanted))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    by_rows = [functools.partial(part, place) for place in range(len(sources))]
    return Rule(tuple(each if x.axis == dim else None for each, x in zip(by_rows, sources, strict=True)), make)


def scattered(node: Node, sources: Sources) -> Rule | None:
    """Some contiguous rows of the first argument are replaced by those of the second."""
    dim = argument(node, 2, "dim", 0) % len(node.shape)
    if dim != node.axis:
        return beside(lambda node, source: {dim})(node, sources)
    if argument(node, 5, "step", 1) != 1 or any(source.axis != dim for source in sources):
        return None
    start, end, _ = slice(argument(node, 3, "start"), argument(node, 4, "end")).indices(node.rows)

    def replaced(span: Span) -> Span:
        return Span(span.lo - start, span.hi - start).within(end - start)

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        before, after = pieces
        rows, wanted = crop(before.tensor, dim, before.span, span).clone(), replaced(span)
        if wanted.lo < wanted.hi:
            place = rows.narrow(dim, wanted.lo + start - span.lo, wanted.hi - wanted.lo)
            place.copy_(crop(after.tensor, dim, after.span, wanted))
        return rows

    return Rule((same, replaced), make)
