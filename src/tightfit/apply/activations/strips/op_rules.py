"""Rules: how each of torch's operators that autoencoders use is computed by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.apply.activations.strips.program import Node, Program
from tightfit.apply.activations.strips.rows import (
    Needs,
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
    same,
    times,
)
from tightfit.apply.activations.strips.spatial_rules import (
    PADS,
    concatenated,
    convolution,
    interleaved,
    nearest,
    pad,
    pool,
    scattered,
    shuffle,
    transposed,
)
from tightfit.apply.activations.strips.statistics import normalise

__all__ = ["rule_for"]


def rule_for(program: Program, index: int) -> Rule | None:
    """Return the rule of a node; None if it has to be computed whole."""
    node = program.nodes[index]
    sources = [program.nodes[source] for source in node.sources]
    if node.axis is None:
        return None
    name = node.op.removeprefix("aten.").partition(".")[0]
    if name in _FILLED:
        return _filled(node, _FILLED[name](node))
    if not sources:
        return None
    find = _RULES.get(name) or (_pointwise if torch.Tag.pointwise in node.overload.tags else None)
    return find(node, sources) if find else None


def _positive(dims: Any, ndim: int) -> set[int]:
    listed = dims if isinstance(dims, list | tuple) else [dims]
    return {dim % ndim for dim in listed if dim is not None}


# each row of the output depends on the same row of the arguments


def _pointwise(node: Node, sources: Sources) -> Rule | None:
    """Each element by itself; arguments without the row dimension, or with one row for all, are passed whole."""
    assert node.axis is not None
    if node.varying:
        return None
    from_right = len(node.shape) - node.axis
    needs = []
    for source in sources:
        place = len(source.shape) - from_right
        rows = source.shape[place] if place >= 0 else 1
        if rows not in (1, node.rows) or (rows > 1 and source.axis != place):
            return None
        needs.append(same if rows > 1 else None)
    run = caller(node)
    return Rule(tuple(needs), lambda pieces, span: run(pieces))


def _at(place: int, name: str, default: Any = None) -> Callable[[Node, Node], set[int]]:
    """Return the dimensions that an argument names; all dimensions if it names none."""

    def dims(node: Node, source: Node) -> set[int]:
        named = argument(node, place, name, default)
        return set(range(len(source.shape))) if named is None else _positive(named, len(source.shape))

    return dims


def _last(count: Callable[[Node], int]) -> Callable[[Node, Node], set[int]]:
    return lambda node, source: set(range(len(source.shape) - count(node), len(source.shape)))


def _slice(node: Node, sources: Sources) -> Rule | None:
    source = sources[0]
    dim = argument(node, 1, "dim", 0) % len(source.shape)
    if dim != source.axis:
        return beside(nowhere)(node, sources)
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    start = max(start + source.rows, 0) if start < 0 else start

    def needs(span: Span) -> Span:
        return Span(span.lo * step + start, (span.hi - 1) * step + start + 1)

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        return torch.ops.aten.slice.Tensor(pieces[0].tensor, dim, 0, None, step)  # type: ignore[no-any-return]

    return Rule((needs,), make)


# shapes


def _reshape(node: Node, sources: Sources) -> Rule | None:
    """Rows stay rows if the dimensions before them keep their size; a factor moved into or out of rows scales them."""
    source, axis = sources[0], node.axis
    assert axis is not None
    if source.axis is None or math.prod(source.shape[: source.axis]) != math.prod(node.shape[:axis]):
        return None
    inner, outer = math.prod(source.shape[source.axis + 1 :]), math.prod(node.shape[axis + 1 :])
    before, after = node.shape[:axis], node.shape[axis + 1 :]
    if outer % inner == 0:  # an output row consists of several input rows
        several = outer // inner
        needs = lambda span: Span(span.lo * several, span.hi * several)  # noqa: E731
        return Rule((needs,), lambda p, span: p[0].tensor.reshape(*before, span.hi - span.lo, *after))
    if inner % outer:
        return None
    several = inner // outer

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        (tensor, has), scaled = pieces[0], times(pieces[0].span, several)
        return crop(tensor.reshape(*before, (has.hi - has.lo) * several, *after), node.axis or 0, scaled, span)

    return Rule((lambda span: covering(span, several),), make)


def _expand(node: Node, sources: Sources) -> Rule | None:
    source, axis = sources[0], node.axis
    assert axis is not None
    place = axis - (len(node.shape) - len(source.shape))
    if source.axis not in (None, place) or (source.axis is None and place >= 0 and source.shape[place] != 1):
        return None
    before, after = node.shape[:axis], node.shape[axis + 1 :]
    needs = None if source.axis is None else same
    return Rule((needs,), lambda pieces, span: pieces[0].tensor.expand(*before, span.hi - span.lo, *after))


def _repeat(node: Node, sources: Sources) -> Rule | None:
    source, counts = sources[0], node.args[1]
    if source.axis is None or source.rows != node.rows or len(counts) < len(source.shape):
        return None
    if source.axis + len(counts) - len(source.shape) != node.axis:
        return None
    run = caller(node)
    return Rule((same,), lambda pieces, span: run(pieces))


# some rows of one argument, all of another


def _meshgrid(node: Node, sources: Sources) -> Rule | None:
    """One argument, laid out along its own dimension and expanded along the others."""
    given, axis, shape = node.output or 0, node.axis, node.shape
    if any(len(source.shape) != 1 for source in sources):
        return None
    swapped = node.kwargs.get("indexing", "ij") == "xy" and given < 2
    own = 1 - given if swapped else given
    needs = tuple(same if place == given and own == axis else None for place in range(len(sources)))

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        laid = pieces[given].tensor.reshape([-1 if i == own else 1 for i in range(len(shape))])
        return laid.expand([span.hi - span.lo if i == axis else size for i, size in enumerate(shape)])

    return Rule(needs, make)


def _matmul(node: Node, sources: Sources) -> Rule | None:
    """Rows of the output are rows of the left matrix, columns of the right one, or batch entries of both."""
    left, right = sources[-2:]
    axis = node.axis
    assert axis is not None
    if len(sources) > 2 and sources[0].axis is not None:
        return None
    from_right = len(node.shape) - axis
    rows, columns = (None if x.axis is None else len(x.shape) - x.axis for x in (left, right))
    own: tuple[Needs | None, Needs | None]
    if from_right == rows == 2:
        own = same, None
    elif from_right == columns == 1 and rows is None:
        own = None, same
    elif from_right > 2 and rows == columns == from_right:
        own = same, same
    else:
        return None
    run = caller(node)
    return Rule((*(None for _ in sources[:-2]), *own), lambda pieces, span: run(pieces))


def _attention(node: Node, sources: Sources) -> Rule | None:
    """Some queries attend to all keys."""
    query = sources[0]
    if query.axis != node.axis or query.axis != len(query.shape) - 2:
        return beside(lambda node, source: {len(source.shape) - 1, len(source.shape) - 2})(node, sources)
    if argument(node, 4, "dropout_p", 0.0) or argument(node, 5, "is_causal", False):
        return None
    needs = [same, None, None]
    for mask in sources[3:]:
        if mask.axis not in (None, len(mask.shape) - 2, len(mask.shape) - 1) or mask.rows not in (0, node.rows):
            return None
        needs.append(same if mask.axis == len(mask.shape) - 2 else None)
    run = caller(node)
    return Rule(tuple(needs), lambda pieces, span: run(pieces))


def _group_norm(node: Node, sources: Sources) -> Rule | None:
    """By rows, once mean and variance of all rows are known; these are the last of `pieces`."""
    if sources[0].axis != node.axis or node.axis in (0, 1):
        return None
    groups, eps = node.args[1], argument(node, 4, "eps", 1e-5)
    given = len(node.sources)

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        affine = [piece.tensor for piece in pieces[1:given]]
        return normalise(pieces[0].tensor, pieces[-1].tensor, groups, eps, *affine)

    return Rule((same, *(None for _ in sources[1:])), make, statistics=True)


def _filled(node: Node, value: Any) -> Rule:
    """Rows filled with `value`, or uninitialized if it is None."""
    axis, nothing = node.axis or 0, lambda span: Span(0, 0)

    def make(pieces: Sequence[RowSlice], span: Span) -> torch.Tensor:
        size = [span.hi - span.lo if dim == axis else side for dim, side in enumerate(node.shape)]
        made = torch.empty(size, dtype=node.dtype, device=pieces[-1].tensor.device)
        return made if value is None else made.fill_(value)

    return Rule(tuple(nothing for _ in node.sources), make, makes=True)


_FILLED: dict[str, Callable[[Node], Any]] = {
    **dict.fromkeys(("empty", "new_empty"), lambda node: None),
    **dict.fromkeys(("zeros", "new_zeros"), lambda node: 0),
    **dict.fromkeys(("ones", "new_ones"), lambda node: 1),
    "full": lambda node: argument(node, 1, "fill_value"),
    "new_full": lambda node: argument(node, 2, "fill_value"),
}
_ALONG_DIM_1 = beside(_at(1, "dim", 0))
_NORMALISED = beside(_last(lambda node: len(node.args[1])))
_MOVED = beside(nowhere)  # dimensions are moved, added or removed: the shapes show where the rows are

_RULES: dict[str, Callable[[Node, Sources], Rule | None]] = {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "cumsum", "select", "sum", "mean", "amax", "amin", "norm",
                     "argmax", "argmin", "var", "std", "prod", "any", "all", "flip", "glu"), _ALONG_DIM_1),
    **dict.fromkeys(("cat", "concat", "concatenate"), concatenated),
    **dict.fromkeys(("permute", "transpose", "movedim", "t", "swapaxes", "adjoint"), _MOVED),
    **dict.fromkeys(("stack", "unsqueeze", "squeeze"), _MOVED),
    **dict.fromkeys(("to", "_to_copy", "contiguous", "clone", "detach", "alias", "zeros_like", "ones_like",
                     "empty_like", "full_like", "copy", "where", "masked_fill", "dropout", "batch_norm"), _pointwise),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d"), pool),
    **dict.fromkeys(PADS, pad),
    **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
                     "_upsample_nearest_exact3d", "upsample_nearest1d"), nearest),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), shuffle),
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm"), _matmul),
    **dict.fromkeys(("layer_norm", "rms_norm"), _NORMALISED),
    "linalg_vector_norm": beside(_at(2, "dim")),
    "linear": beside(_last(lambda node: 1)),
    "view_as_complex": beside(_last(lambda node: 1)),  # of the last dimension's pairs
    "view_as_real": _MOVED,
    "embedding": _MOVED,
    "slice": _slice,
    "slice_scatter": scattered,
    "select_scatter": beside(lambda node, x: _at(2, "dim", 0)(node, x) if len(x.shape) == len(node.shape) else set()),
    "meshgrid": _meshgrid,
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": interleaved,
    "scaled_dot_product_attention": _attention,
    "group_norm": _group_norm,
}  # fmt: skip
