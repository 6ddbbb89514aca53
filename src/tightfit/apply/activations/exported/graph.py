"""A network as a value: ATen operations in order, without weights and without Python code.

Values are numbered: first the input tensors, then weights, then constants, then the result of each operation.
Operations and their arguments are encoded as in `serialization.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tightfit.apply.activations.serialization import find_operation, read_argument, written_argument
from tightfit.errors import InputError, ModelError
from tightfit.schema.base import Record

__all__ = ["ExportedGraph", "GraphStep", "Operation", "filled", "graph_of", "ready", "steps_of"]

_DROPPED = torch.ops.aten._assert_tensor_metadata.default  # it checks what is known of inputs and weights beforehand


class Operation(Record):
    """One call of an operation: "aten.linear.default", or "getitem" for one of several results."""

    error: ClassVar[type[InputError]] = ModelError

    op: str
    args: list[Any]
    kwargs: dict[str, Any] = Field(default_factory=dict)
    inside: str = ""  # path of the module that the operation belongs to


class ExportedGraph(Record):
    """The operations of a network, from its inputs to its outputs."""

    error: ClassVar[type[InputError]] = ModelError

    inputs: tuple[str, ...]  # names of input tensors
    weights: tuple[str, ...]  # names of parameters and buffers
    constants: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: list[Any]


# ExportedProgram → ExportedGraph


def graph_of(program: ExportedProgram, inputs: list[str]) -> ExportedGraph:
    """Return the graph of `program`, exported on HERE with tensor `inputs`. ModelError for operations outside ATen."""
    numbers, names = _numbered(program, inputs)
    operations = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not _DROPPED:
            kwargs = {key: _written(value, numbers) for key, value in node.kwargs.items()}
            args = _written(node.args, numbers)
            operations.append(Operation(op=_name_of(node), args=args, kwargs=kwargs, inside=_inside(node)))
            numbers[node] = len(numbers)
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]
    changed = [spec.kind for spec in program.graph_signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    if changed:
        raise ModelError(f"the network changes what it is given ({changed[0].name}), which cannot be exported")
    return ExportedGraph(**names, operations=tuple(operations), outputs=_written(outputs, numbers))


_KINDS = {
    InputKind.USER_INPUT: "inputs",
    InputKind.PARAMETER: "weights",
    InputKind.BUFFER: "weights",
    InputKind.CONSTANT_TENSOR: "constants",
}


def _numbered(program: ExportedProgram, inputs: list[str]) -> tuple[dict[torch.fx.Node, int], dict[str, Any]]:
    """Number the inputs, weights and constants; return the numbers and their names."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    found: dict[str, list[tuple[torch.fx.Node, str]]] = {kind: [] for kind in ("inputs", "weights", "constants")}
    given = iter(inputs)
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind not in _KINDS:
            raise ModelError(f"the network is given {node.name}, a {spec.kind.name}, which cannot be exported")
        if isinstance(node.meta.get("val"), torch.Tensor):
            name = next(given) if spec.kind is InputKind.USER_INPUT else str(spec.target)
            found[_KINDS[spec.kind]].append((node, name))
    nodes = [node for group in found.values() for node, _ in group]
    names = {kind: tuple(name for _, name in group) for kind, group in found.items()}
    return {node: number for number, node in enumerate(nodes)}, names


def _name_of(node: torch.fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return str(node.target)
    inside = _inside(node)
    where = f" in {inside}" if inside else ""
    raise ModelError(f"the network uses {node.target}{where}, which is no operation of ATen: it cannot be exported")


def _inside(node: torch.fx.Node) -> str:
    """Path of the module that the operation belongs to."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    return stack[-1][0] if stack else ""


def _written(value: Any, numbers: dict[torch.fx.Node, int]) -> Any:
    """Return `value`, an argument of an operation, as JSON."""
    return written_argument(value, lambda item: numbers[item] if isinstance(item, torch.fx.Node) else None)


# ExportedGraph → callable steps


class _Value(NamedTuple):
    number: int


class _Here:
    """Placeholder for the device on which the network runs."""


class GraphStep(NamedTuple):
    """An operation ready to be called; afterwards the values numbered `over` are freed."""

    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    inside: str
    over: tuple[int, ...]

    def work(self, value: Callable[[int], Any], device: torch.device) -> Any:
        """Return the result, with `value(number)` for each numbered value."""
        return self.call(*filled(self.args, value, device), **filled(self.kwargs, value, device))


def ready(argument: Any) -> Any:
    """Decode the JSON `argument` of an operation, so that it can be `filled`."""
    return read_argument(argument, _Value, _Here())


def filled(argument: Any, value: Callable[[int], Any], device: torch.device) -> Any:
    """Return `argument` with values in place of numbers, and `device` in place of its placeholder."""
    kind = type(argument)
    if kind is _Value:
        return value(argument.number)
    if kind is list:
        return [filled(item, value, device) for item in argument]
    if kind is dict:
        return {key: filled(item, value, device) for key, item in argument.items()}
    return device if kind is _Here else argument


def steps_of(graph: ExportedGraph) -> list[GraphStep]:
    """Return the operations of `graph` in order. ModelError if one is unknown to torch or uses a value too early."""
    first = len(graph.inputs) + len(graph.weights) + len(graph.constants)
    used = [sorted(set(_numbers([op.args, [*op.kwargs.values()]]))) for op in graph.operations]
    kept = set(_numbers(graph.outputs))
    for place, numbers in enumerate([*used, sorted(kept)]):
        if numbers and not 0 <= numbers[0] <= numbers[-1] < first + place:
            raise ModelError(f"operation {place} of the graph uses value {numbers[-1]}, which is not there yet")
    last = {number: place for place, numbers in enumerate(used) for number in numbers}
    over: dict[int, list[int]] = {}
    for number in range(first + len(used)):
        if number not in kept:
            over.setdefault(last.get(number, max(number - first, 0)), []).append(number)
    return [
        GraphStep(
            _called(op.op),
            ready(op.args),
            {key: ready(value) for key, value in op.kwargs.items()},
            op.inside,
            tuple(over.get(place, ())),
        )
        for place, op in enumerate(graph.operations)
    ]


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict) and isinstance(value.get("value"), int):
        yield value["value"]


def _called(name: str) -> Callable[..., Any]:
    return operator.getitem if name == "getitem" else find_operation(name)
