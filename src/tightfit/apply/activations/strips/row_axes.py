"""The row axis of each operation, by comparison of the same call at two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightfit.apply.activations.strips.program import Node, Program, replace_refs

__all__ = ["UnsupportedGraph", "with_axes"]


class UnsupportedGraph(Exception):
    """The method cannot run in strips; the message says why."""


def with_axes(one: Program, other: Program) -> Program:
    """Return `one` with its axes: the first dimension of each node whose size differs in `other`.

    What does not depend on the inputs may be computed differently at another size, such as position embeddings that
    are stored for one size; then only its results are compared. Raises UnsupportedGraph.
    """
    if _alike(one.nodes, other.nodes):
        return replace(one, nodes=tuple(_compared(a, b) for a, b in zip(one.nodes, other.nodes, strict=True)))
    return replace(one, nodes=_from_outputs(one, other))


def _alike(nodes: Sequence[Node], others: Sequence[Node]) -> bool:
    """Whether each node has the same operation and the same sources as its counterpart."""
    pairs = zip(nodes, others, strict=False)
    return len(nodes) == len(others) and all(a.op == b.op and a.sources == b.sources for a, b in pairs)


def _from_outputs(one: Program, other: Program) -> tuple[Node, ...]:
    """Return the nodes of `one`, compared with those of `other` from the outputs back to the inputs."""
    dependent, others = _dependent(one), _dependent(other)
    found: dict[int, Node] = {}
    pairs: dict[int, int] = {}
    left = list(zip((*one.outputs, *one.inputs), (*other.outputs, *other.inputs), strict=True))
    while left:
        index, counterpart = left.pop()
        if index in pairs and (pairs[index] == counterpart or index not in dependent):
            continue
        node, its = one.nodes[index], other.nodes[counterpart]
        if index in pairs or (index in dependent) != (counterpart in others):
            raise _different(one, other)
        pairs[index] = counterpart
        if index not in dependent:
            found[index] = _sized(node, its)
            continue
        if node.op != its.op or len(node.sources) != len(its.sources):
            raise _different(one, other)
        found[index] = _compared(node, its)
        left += zip(node.sources, its.sources, strict=True)
    return tuple(found.get(index, node) for index, node in enumerate(one.nodes))


def _dependent(program: Program) -> set[int]:
    """Return the nodes that depend on the program's inputs."""
    found = set(program.inputs)
    for index, node in enumerate(program.nodes):
        if found.intersection(node.sources):
            found.add(index)
    return found


def _different(one: Program, other: Program) -> UnsupportedGraph:
    return UnsupportedGraph(f"it does {len(one.nodes)} things at one height and {len(other.nodes)} at another")


def _compared(one: Node, other: Node) -> Node:
    varying = _plain(one) != _plain(other)
    return replace(_sized(one, other), varying=varying)


def _plain(node: Node) -> str:
    """Its arguments, except for the nodes that it takes."""
    return repr(replace_refs((node.args, node.kwargs), lambda _: ...))


def _sized(one: Node, other: Node) -> Node:
    if len(one.shape) != len(other.shape):
        raise UnsupportedGraph(f"{one.op} has {len(one.shape)} dimensions at one height, {len(other.shape)} at another")
    differs = [axis for axis, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
    return replace(one, axis=differs[0] if differs else None)
