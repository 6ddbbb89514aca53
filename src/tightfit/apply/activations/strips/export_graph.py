"""A live module's method → the Program of one call of it, by torch.export, with the row axis of each operation.

The method is exported for two heights, without weights (shapes on the "meta" device). The dimension that differs is an
operation's row axis.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tightfit.apply.activations.exporting import NotExported, export
from tightfit.apply.activations.strips.long_clips import (
    Unsteady,
    continued,
    operations_in,
    operations_of,
    short_lengths,
)
from tightfit.apply.activations.strips.program import Node, Program, Ref
from tightfit.apply.activations.strips.row_axes import UnsupportedGraph, with_axes

__all__ = ["UnsupportedGraph", "capture", "capture_at"]

# no-ops here: dropout is off, and nothing is written into these copies
_SAME = {
    "aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default",
    "aten.lift_fresh_copy.default", "aten.dropout.default", "aten.feature_dropout.default",
}  # fmt: skip
_NEUTRAL = {"aten.mul.Tensor": 1, "aten.div.Tensor": 1, "aten.add.Tensor": 0, "aten.sub.Tensor": 0}
MOST_GRANULE = 32  # pixels; heights are often multiples of this
MOST_OPERATIONS = 20_000  # each takes a few milliseconds to export
_CHECKS = ("aten._assert", "aten.sym_constrain", "aten._check")


def capture(module: nn.Module, call: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Program:
    """Return the Program of `call(module, *inputs)`; `module` is `without_weights`, `inputs` are shapes on "meta".

    Rows are those of the first input's second-to-last dimension; of other inputs, of the same dimension if its size is
    a multiple. Of a long clip only short ones are exported, if the method repeats itself. Raises UnsupportedGraph.
    """
    work = _Entry(module, call)
    program = _long_clip(work, inputs)
    if program is None:
        _check_length(work, inputs)
        program = _at_two_heights(work, inputs)
    return _simplified(program)


def capture_at(
    module: nn.Module,
    call: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
) -> Program:
    """Return the Program of `call(module, *inputs)`; rows are the dimension that differs in the call with `others`.

    All are shapes on "meta". Raises UnsupportedGraph.
    """
    work = _Entry(module, call)
    _check_length(work, inputs)
    try:
        one, other = (_nodes(_export(work, each)) for each in (inputs, others))
        return _simplified(with_axes(one, other))
    except UnsupportedGraph:  # one of them may have been decomposed
        one, other = (_nodes(_export(work, each, decomposed=True)) for each in (inputs, others))
        return _simplified(with_axes(one, other))


def _check_length(work: _Entry, inputs: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedGraph for methods that take minutes to export, such as those with many tiles of their own."""
    with contextlib.suppress(NotExported):  # the export reports it
        count = len(operations_of(lambda: work(*inputs)))
        if count > MOST_OPERATIONS:
            raise UnsupportedGraph(
                f"it does {count} operations, and to export more than {MOST_OPERATIONS} takes too long"
            )


def _at_two_heights(work: _Entry, inputs: Sequence[torch.Tensor]) -> Program:
    """Return the program at the height of `inputs`; one at another height with the same operations shows the row axes.

    Twice the height is tried first. Methods that split their work by bytes need a height close by, and if a split lies
    just above, one below.
    """
    rows = inputs[0].shape[-2]
    one = _nodes(_export(work, inputs))

    def compared(taller: int) -> Program:
        other = _nodes(_export(work, [_taller(x, rows, taller) for x in inputs]))
        return with_axes(one, other)

    close = math.gcd(rows, MOST_GRANULE)
    heights = [2 * rows, rows + close] + ([rows - close] if rows > close else [])
    for height in heights[:-1]:
        with contextlib.suppress(UnsupportedGraph):
            return compared(height)
    return compared(heights[-1])


def _long_clip(work: _Entry, inputs: Sequence[torch.Tensor]) -> Program | None:
    """Return the program of a clip from those of shorter ones; None if it is no clip or does not repeat itself."""
    first, *others = inputs
    if first.ndim != 5:
        return None

    def clip(frames: int) -> list[torch.Tensor]:
        batch, channels, _, *size = first.shape
        return [torch.empty(batch, channels, frames, *size, dtype=first.dtype, device=first.device), *others]

    @functools.cache
    def operations(frames: int) -> list[tuple[Any, ...]]:
        return operations_of(lambda: work(*clip(frames)))

    frames = first.shape[2]
    try:
        lengths = short_lengths(frames, lambda frames: len(operations(frames)))
        if lengths is None or len(operations(lengths[1])) > MOST_OPERATIONS:
            return None
        short, longer = lengths
        times = (frames - short) // (longer - short)
        program = continued(_at_two_heights(work, clip(short)), _nodes(_export(work, clip(longer))), times)
        return program if operations_in(program) == operations(frames) else None
    except (NotExported, Unsteady):
        return None


class _Entry(nn.Module):
    """The call as a module, as torch.export requires."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.call(self.module, *inputs))


def _export(work: _Entry, inputs: Sequence[torch.Tensor], *, decomposed: bool = False) -> ExportedProgram:
    try:
        return export(work, inputs, {}, functional=True, decomposed=decomposed)
    except NotExported as error:
        raise UnsupportedGraph(f"torch.export: {error}") from error


def _nodes(exported: ExportedProgram) -> Program:
    """Convert an exported program to a Program, without axes."""
    nodes: list[Node] = []
    place: dict[fx.Node, int] = {}
    inputs: list[int] = []
    given = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}

    def ours(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(place[value])
        if isinstance(value, list | tuple):
            return [ours(item) for item in value]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedGraph(f"a size that depends on values: {value}")
        return value

    constants: dict[str, torch.Tensor] = {}
    outputs: list[int] = []
    for node in exported.graph.nodes:
        if node.op == "output":
            outputs = [place[value] for value in node.args[0]]
        elif node.op == "placeholder":
            spec = given[node.name]
            if spec.kind == InputKind.USER_INPUT:
                inputs.append(len(nodes))
                nodes.append(_placeholder(node, "input"))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                nodes.append(_placeholder(node, "weight", str(spec.target).removeprefix("module.")))
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                constants[str(spec.target)] = exported.constants[str(spec.target)]
                nodes.append(_placeholder(node, "constant", str(spec.target)))
            else:
                raise UnsupportedGraph(f"torch.export: an input of kind {spec.kind.name}")
            place[node] = len(nodes) - 1
        elif str(node.target).startswith(_CHECKS):
            continue
        else:
            nodes.append(_operation(node, ours))
            place[node] = len(nodes) - 1
    return Program(tuple(nodes), tuple(inputs), tuple(outputs), constants)


def _placeholder(node: fx.Node, op: str, name: str = "") -> Node:
    return Node(op, (), {}, tuple(node.meta["val"].shape), node.meta["val"].dtype, name=name)


def _operation(node: fx.Node, ours: Callable[[Any], Any]) -> Node:
    target, args, kwargs = node.target, node.args, node.kwargs
    output: Any = None
    if target is operator.getitem:
        maker: Any
        maker, output = node.args
        target, args, kwargs = maker.target, maker.args, maker.kwargs
    if not isinstance(target, torch._ops.OpOverload):
        raise UnsupportedGraph(f"torch.export: {target} is none of torch's operators")
    value = node.meta["val"]
    several = not isinstance(value, torch.Tensor)  # its outputs are taken one by one, by getitem
    shape, dtype = ((), torch.uint8) if several else (tuple(value.shape), value.dtype)
    own = {key: ours(item) for key, item in kwargs.items() if key not in ("device", "pin_memory", "layout")}
    return Node(str(target), tuple(ours(args)), own, shape, dtype, output=output)


def _taller(x: torch.Tensor, rows: int, taller: int) -> torch.Tensor:
    """Return `x` as it would be if the first input had `taller` rows instead of `rows`."""
    if x.ndim < 4 or x.shape[-2] % rows:
        return x
    return torch.empty(*x.shape[:-2], x.shape[-2] // rows * taller, x.shape[-1], dtype=x.dtype, device=x.device)


def _simplified(program: Program) -> Program:
    """Remove operations without effect, and turn parts of split tensors into slices."""
    stands_for: dict[int, int] = {}
    nodes = list(program.nodes)
    for index, node in enumerate(nodes):
        moved = node.renumbered(stands_for)
        nodes[index] = moved = _explicit(_slice(moved, nodes))
        if moved.sources and _does_nothing(moved, nodes):
            stands_for[index] = moved.sources[0]
    outputs = [stands_for.get(index, index) for index in program.outputs]
    return replace(program, nodes=tuple(nodes), outputs=tuple(outputs)).compacted()


def _does_nothing(node: Node, nodes: Sequence[Node]) -> bool:
    source = nodes[node.sources[0]]
    if node.shape != source.shape or node.dtype != source.dtype:
        return False
    if node.op in _NEUTRAL and len(node.args) == 2 and not node.kwargs:
        return isinstance(node.args[1], int | float) and node.args[1] == _NEUTRAL[node.op]
    if node.op.startswith(("aten.to.", "aten._to_copy.")):
        return True
    copies = node.op in ("aten.clone.default", "aten.contiguous.default")
    return node.op in _SAME and not (copies and _is_spread(source, nodes))


def _is_spread(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether the node's elements are spread over another tensor's memory.

    Kernels may need them contiguous, and as long as they are not, all of that memory is kept.
    """
    while node.is_view:
        source = nodes[node.sources[0]]
        if node.word in ("permute", "transpose", "t", "movedim") or source.bytes > node.bytes:
            return True
        node = source
    return False


def _explicit(node: Node) -> Node:
    """Replace operations that take shape or dtype from another tensor by ones that state it."""
    if node.op in ("aten.expand_as.default", "aten.view_as.default", "aten.reshape_as.default"):
        op = node.op.replace("_as", "").replace("view.default", "reshape.default")
        return replace(node, op=op, args=(node.args[0], list(node.shape)))
    if node.op == "aten.type_as.default":
        return replace(node, op="aten.to.dtype", args=(node.args[0], node.dtype))
    return node


def _slice(node: Node, nodes: Sequence[Node]) -> Node:
    """Return one part of a split tensor as a slice; other nodes unchanged."""
    if node.output is None or not node.sources:
        return node
    source = nodes[node.sources[0]]
    given: dict[str, Any] = dict(zip(("self", "how", "dim"), node.args, strict=False)) | node.kwargs
    if node.op == "aten.unbind.int":
        dim = given.get("dim", given.get("how", 0))
        return replace(node, op="aten.select.int", args=(node.args[0], dim, node.output), kwargs={}, output=None)
    dim = given.get("dim", 0)
    whole = source.shape[dim]
    how: Any = next((given[name] for name in ("how", "split_size", "split_sizes", "chunks") if name in given), None)
    if node.op in ("aten.split.Tensor", "aten.chunk.default"):
        size = how if node.op == "aten.split.Tensor" else -(-whole // how)
        sizes = [size] * (node.output + 1)
    elif node.op in ("aten.split_with_sizes.default", "aten.split.sizes"):
        sizes = list(how)
    else:
        return node
    starts = [0, *accumulate(sizes)]
    span = starts[node.output], min(starts[node.output + 1], whole)
    return replace(node, op="aten.slice.Tensor", args=(node.args[0], dim, *span), kwargs={}, output=None)
