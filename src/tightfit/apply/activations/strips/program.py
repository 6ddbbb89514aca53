"""A network's method as a list of operations without side effects, each with its row axis.

It is a plain value: it holds no weights (only their names), converts to JSON and back, and can be stored in a file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tightfit.apply.activations.strips.workarounds import avg_pool3d

__all__ = ["Node", "Program", "Ref", "refs_in", "replace_refs"]

_VIEWS = {
    "slice", "select", "permute", "transpose", "t", "movedim", "unsqueeze", "squeeze", "expand", "unflatten",
}  # fmt: skip


class Ref(NamedTuple):
    """Reference to the output of a node, by index."""

    node: int


@dataclass(frozen=True)
class Node:
    """One operation and what is known of its output.

    `op` is "input", "weight", "constant" or the name of one of torch's operators. `axis` is the first dimension whose
    size depends on the height of the input; None if there is none.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    varying: bool = False  # whether a plain argument depends on the height, besides the output's shape
    name: str = ""  # of a weight or constant
    output: int | None = None  # index among several outputs

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Indices of the nodes it takes, one for each place among its arguments."""
        return tuple(refs_in((self.args, self.kwargs)))

    @cached_property
    def rows(self) -> int:
        """Number of rows of its output; 0 without an axis."""
        return 0 if self.axis is None else self.shape[self.axis]

    @cached_property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @cached_property
    def row_bytes(self) -> int:
        return self.bytes // max(self.rows, 1)

    @cached_property
    def word(self) -> str:
        """Name of its operator without namespace and overload: "slice" of "aten.slice.Tensor"."""
        return self.op.removeprefix("aten.").partition(".")[0]

    @property
    def is_view(self) -> bool:
        """Whether its output shares the memory of its first argument."""
        return self.word in _VIEWS

    def renumbered(self, numbers: Mapping[int, int]) -> Node:
        """Return a copy that takes other nodes: `numbers` has the new index of each that changes."""
        by = lambda ref: Ref(numbers.get(ref.node, ref.node))  # noqa: E731
        return replace(self, args=replace_refs(self.args, by), kwargs=replace_refs(self.kwargs, by))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run it on `tensor`, its only source."""
        args, kwargs = replace_refs((self.args, self.kwargs), lambda _: tensor)
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def draws_noise(self) -> bool:
        """Whether it draws random numbers; attention would for its dropout, which is off."""
        if not self.op.startswith("aten.") or "attention" in self.op:
            return False
        return torch.Tag.nondeterministic_seeded in self.overload.tags

    @property
    def makes(self) -> bool:
        """Whether it creates a tensor without taking any, and needs a device for it."""
        return not self.sources and any(argument.name == "device" for argument in self.overload._schema.arguments)

    @property
    def overload(self) -> Any:
        """Its operator in torch.ops."""
        return operator.attrgetter(self.op)(torch.ops)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function that runs it."""
        if self.op == "aten.scaled_dot_product_attention.default":  # looked up at each call: it may be patched
            return lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs)  # noqa: PLW0108
        if self.op == "aten.avg_pool3d.default":
            return avg_pool3d
        found = self.overload
        if self.output is None:
            return found  # type: ignore[no-any-return]
        return lambda *args, **kwargs: found(*args, **kwargs)[self.output]


@dataclass(frozen=True)
class Program:
    """Nodes in an order in which they may run; `inputs` and `outputs` are indices of nodes."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def draws_noise(self) -> bool:
        """Whether it draws random numbers."""
        return any(node.draws_noise for node in self.nodes)

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Cache of values derived from it, by name: it never changes."""
        return {}

    @cached_property
    def scattered(self) -> frozenset[int]:
        """Views that are not contiguous, such as some of a clip's frames."""
        views: dict[int, torch.Tensor] = {}
        for index, node in enumerate(self.nodes):
            if not node.is_view or len(node.sources) != 1:
                continue
            source = node.sources[0]
            shape, dtype = self.nodes[source].shape, self.nodes[source].dtype
            whole = views[source] if source in views else torch.empty(shape, dtype=dtype, device="meta")
            views[index] = node.of(whole)
        return frozenset(index for index, view in views.items() if not view.is_contiguous())

    @cached_property
    def kinds(self) -> list[int]:
        """A number for each node: those with the same one do the same to arguments of the same layout."""
        numbers: dict[str, int] = {}
        said = (_described(node, [self.nodes[source] for source in node.sources]) for node in self.nodes)
        return [numbers.setdefault(words, len(numbers)) for words in said]

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that take its output."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in dict.fromkeys(node.sources):
                found[source].append(index)
        return tuple(map(tuple, found))

    def operations(self, index: int) -> int:
        """Approximate number of additions and multiplications of a heavy node."""
        node = self.nodes[index]
        shapes = [self.nodes[source].shape for source in node.sources]
        if "conv" in node.op:
            deep = math.prod(shapes[1][1:])
        elif "attention" in node.op:
            deep = 2 * shapes[1][-2]
        else:
            deep = shapes[0 if "linear" in node.op else -2][-1]
        return 2 * math.prod(node.shape) * deep

    def compacted(self) -> Program:
        """Return a copy with only the inputs and what the outputs need, renumbered."""
        needed = {*self.inputs, *self.outputs}
        for index in range(len(self.nodes) - 1, -1, -1):
            if index in needed:
                needed.update(self.nodes[index].sources)
        numbers = {old: new for new, old in enumerate(sorted(needed))}
        kept = tuple(self.nodes[old].renumbered(numbers) for old in numbers)
        used = {node.name for node in kept if node.op == "constant"}
        return Program(
            kept,
            tuple(numbers[index] for index in self.inputs),
            tuple(numbers[index] for index in self.outputs),
            {name: tensor for name, tensor in self.constants.items() if name in used},
        )


def _described(node: Node, sources: Sequence[Node]) -> str:
    others = replace_refs((node.args, node.kwargs), lambda _: ...)
    given = [(source.shape, source.axis, source.op == "constant" and source.name) for source in sources]
    return repr((node.op, others, node.shape, node.dtype, node.axis, node.varying, node.output, given))


def refs_in(value: Any) -> Iterator[int]:
    """Yield the indices in `value`, nested lists, tuples and dicts, in their order."""
    if isinstance(value, Ref):
        yield value.node
    elif isinstance(value, list | tuple):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_in(item)


def replace_refs(value: Any, by: Callable[[Ref], Any]) -> Any:
    """Return `value` with each Ref replaced by `by(ref)`."""
    if isinstance(value, Ref):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)(replace_refs(item, by) for item in value)
    if isinstance(value, dict):
        return {key: replace_refs(item, by) for key, item in value.items()}
    return value
