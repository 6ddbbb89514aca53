"""Programs of a short clip and of one a step longer → the Program of a clip of any length.

A method that processes a clip step by step does the same in each step: its export takes as long as the clip is long,
although nothing new happens after a few steps. What the longer of two short clips has more than the shorter is the
steady step. It is repeated, with each number and each reference extrapolated from the last two steps. The result is
checked by running the method at full length, by shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.exporting import HERE, play
from tightfit.apply.activations.strips.program import Node, Program, Ref, replace_refs

__all__ = ["Unsteady", "continued", "operations_in", "operations_of", "short_lengths"]

STEPS = (1, 2, 4, 8, 16)  # numbers of frames that a step may have
SETTLED = 4  # steps; later ones are all alike
_UNCOUNTED = {"empty", "split", "split_with_sizes", "unbind"}  # a program has one for each of their parts
Numbers = Callable[..., int]  # a number (or reference) made from those in the same place of other nodes


class Unsteady(Exception):
    """The method does not repeat itself from step to step."""


def short_lengths(frames: int, count: Callable[[int], int]) -> tuple[int, int] | None:
    """Return two numbers of frames, a step apart, that determine a clip of `frames`; None if it is not worth it.

    `count` returns the number of operations for a number of frames.
    """
    for step in STEPS:
        short = frames % step + (SETTLED - bool(frames % step)) * step
        if 2 * (short + step) > frames or count(short) == count(frames):
            return None
        least, more, most = (count(short + extra * step) for extra in range(3))
        if 0 < more - least == most - more:
            return short, short + step
    return None


def continued(short: Program, longer: Program, times: int) -> Program:
    """Return the program of a clip `times` steps longer than `short`; `longer` is one step longer. Raises Unsteady.

    Axes are those of `short`.
    """
    size = len(longer.nodes) - len(short.nodes)
    same = _alike(short.nodes, longer.nodes)
    if not 0 < size <= same or not _same_tables(short.constants, longer.constants):
        raise Unsteady
    before, step = longer.nodes[same - size : same], longer.nodes[same : same + size]
    on: Numbers = lambda one, other: one + times * (other - one)  # noqa: E731
    begin = [_made(on, *pair) for pair in zip(short.nodes[:same], longer.nodes[:same], strict=True)]
    rest = [_made(on, *pair) for pair in zip(short.nodes[same:], longer.nodes[same + size :], strict=True)]
    steps: list[Node] = []
    for number in range(1, times + 1):
        # numbers that follow the length of the clip are those of the full length in `begin` already
        further: Numbers = lambda now, one, other, number=number: now + number * (other - one)  # noqa: E731
        steps += [_made(further, *three) for three in zip(begin[same - size :], before, step, strict=True)]
    outputs = tuple(map(on, short.outputs, longer.outputs))
    return Program((*begin, *steps, *rest), short.inputs, outputs, short.constants)


def _same_tables(tables: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether tables made by the code are the same in both clips; otherwise those of other lengths would be unknown."""
    return tables.keys() == others.keys() and all(torch.equal(tables[name], others[name]) for name in tables)


def _alike(nodes: Sequence[Node], others: Sequence[Node]) -> int:
    """Number of leading nodes that do the same with the same arguments."""
    for index, (node, other) in enumerate(zip(nodes, others, strict=False)):
        if (node.op, node.name, node.sources) != (other.op, other.name, other.sources):
            return index
    return len(nodes)


def _made(numbers: Numbers, node: Node, *others: Node) -> Node:
    """Return `node` with numbers made from its own and those of `others`, which do the same. Raises Unsteady."""
    for other in others:
        if (node.op, node.name, node.dtype) != (other.op, other.name, other.dtype):
            raise Unsteady
    fields = [(one.args, one.kwargs, one.shape, one.output) for one in (node, *others)]
    args, kwargs, shape, output = _combined(numbers, *fields)
    return replace(node, args=args, kwargs=kwargs, shape=shape, output=output)


def _combined(numbers: Numbers, first: Any, *others: Any) -> Any:
    """Return a nested structure like `first`, with numbers made from those in the same place of `others`."""
    if any(type(other) is not type(first) for other in others):
        raise Unsteady
    if isinstance(first, Ref):
        return Ref(numbers(first.node, *(other.node for other in others)))
    if isinstance(first, list | tuple):
        if any(len(other) != len(first) for other in others):
            return _grown(numbers, first, *others)
        return type(first)(_combined(numbers, *items) for items in zip(first, *others, strict=True))
    if isinstance(first, dict):
        if any(other.keys() != first.keys() for other in others):
            raise Unsteady
        return {key: _combined(numbers, item, *(other[key] for other in others)) for key, item in first.items()}
    if isinstance(first, int) and not isinstance(first, bool):
        return numbers(first, *others)
    if any(other != first for other in others):
        raise Unsteady
    return first


def _grown(numbers: Numbers, short: Sequence[Any], longer: Sequence[Any], *others: Any) -> Any:
    """Return a list that has more items for each step, such as the parts that a clip is concatenated from."""
    there, more = len(short), len(longer) - len(short)
    if others or not 0 < more <= there:
        raise Unsteady
    items = [_combined(numbers, *pair) for pair in zip(short, longer, strict=False)]
    for number in range(1, numbers(0, 1) + 1):
        further: Numbers = lambda one, other, number=number: one + number * (other - one)  # noqa: E731
        items += map(lambda *pair: _combined(further, *pair), longer[there - more : there], longer[there:])
    return items if isinstance(short, list) else tuple(items)


def operations_of(work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Return the operations that torch runs in `work`, by shapes alone, each with the shapes of its arguments.

    Raises NotExported for what cannot run by shapes.
    """
    log = _Log()

    def logged() -> None:
        with log:
            work()

    play(logged)
    return log.operations


def operations_in(program: Program) -> list[tuple[Any, ...]]:
    """Return the operations that torch runs in `program`, likewise."""
    return operations_of(lambda: _run(program))


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")  # also the in-place variant
        if name not in _UNCOUNTED:
            given = tree_leaves((args, kwargs))
            self.operations.append((name, *(tuple(x.shape) for x in given if isinstance(x, torch.Tensor))))
        return func(*args, **kwargs or {})


def _run(program: Program) -> None:
    """Run the program on HERE."""
    values: list[torch.Tensor] = []
    for node in program.nodes:
        if node.op in ("input", "weight", "constant"):
            values.append(torch.empty(node.shape, dtype=node.dtype, device=HERE))
        else:
            args, kwargs = replace_refs((node.args, node.kwargs), lambda ref: values[ref.node])
            values.append(node.function(*args, **kwargs, **({"device": HERE} if node.makes else {})))
