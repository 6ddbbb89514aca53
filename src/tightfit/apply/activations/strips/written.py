"""A Program and its Course in words: plain JSON, in which nothing but operations of ATen can be said, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tightfit.apply.activations.exporting import HERE
from tightfit.apply.activations.operations import find_operation, read_argument, written_argument
from tightfit.apply.activations.strips.boundaries import StripPeak
from tightfit.apply.activations.strips.course import StripPlan, planned_stages_of
from tightfit.apply.activations.strips.program import Node, Program, Ref
from tightfit.apply.activations.strips.stages import Stage, StageGraph

__all__ = ["check_program", "program_from_json", "program_to_json", "strip_plan_from_json", "strip_plan_to_json"]

_LEAVES = ("input", "weight", "constant")


def program_to_json(program: Program) -> dict[str, Any]:
    """All of `program` but its constants' values. ModelError for what is not ATen's."""
    nodes = [_written(node) for node in program.nodes]
    return {"nodes": nodes, "inputs": list(program.inputs), "outputs": list(program.outputs)}


def _written(node: Node) -> list[Any]:
    if node.op not in _LEAVES:
        find_operation(node.op)
    args, kwargs = _word(node.args), {key: _word(value) for key, value in node.kwargs.items()}
    known = list(node.shape), _word(node.dtype), node.axis, node.varying
    return [node.op, args, kwargs, *known, node.name, node.output]


def _word(value: Any) -> Any:
    return written_argument(value, lambda item: item.node if isinstance(item, Ref) else None)


def program_from_json(written: Mapping[str, Any], constants: dict[str, torch.Tensor]) -> Program:
    """The Program that is `written`. For what is none it raises ModelError, or whatever Python has to say to it."""
    nodes = tuple(_read(*fields) for fields in written["nodes"])
    return Program(nodes, tuple(written["inputs"]), tuple(written["outputs"]), constants)


def _read(
    op: str, args: Any, kwargs: Any, shape: Any, dtype: Any, axis: Any, varying: Any, name: str, output: Any
) -> Node:
    if op not in _LEAVES:
        find_operation(op)
    named = {key: _meaning(value) for key, value in kwargs.items()}
    return Node(op, tuple(_meaning(args)), named, tuple(shape), _meaning(dtype), axis, varying, name, output)


def _meaning(value: Any) -> Any:
    return read_argument(value, Ref, torch.device(HERE))


def check_program(program: Program, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """ValueError where `program` uses what is not there yet, or other weights or inputs than these."""
    given = dict(zip(program.inputs, inputs, strict=True))
    for place, node in enumerate(program.nodes):
        if not all(0 <= source < place for source in node.sources):
            raise ValueError(f"node {place} takes what is not there yet")
        if node.axis is not None and not 0 <= node.axis < len(node.shape):
            raise ValueError(f"node {place} has no axis {node.axis}")
        there = {
            "input": given.get(place),
            "weight": weights.get(node.name),
            "constant": node.name in program.constants,
        }
        found = there.get(node.op, True)
        if found is None or found is False:
            raise ValueError(f"node {place} is an unknown {node.op}, {node.name}")
        if isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype) != (node.shape, node.dtype):
            raise ValueError(f"node {place}, {node.name}, is {node.dtype} {node.shape}, and here {tuple(found.shape)}")
    if not all(0 <= index < len(program.nodes) for index in program.outputs):
        raise ValueError(f"outputs {program.outputs} of {len(program.nodes)} nodes")


def strip_plan_to_json(course: StripPlan) -> dict[str, Any]:
    """What is long to find of `course`: its stages, and in how many strips each is done."""
    passes = [[*map(list, vars(stage).values()), len(strips), ahead] for stage, strips, ahead in course.passes]
    return {
        "in_order": course.graph.in_order,
        "in_host": sorted(course.in_host),
        "passes": passes,
        "peak": list(course.peak),
    }


def strip_plan_from_json(written: Mapping[str, Any], program: Program) -> StripPlan:
    """The course of `program` that is `written`. For what is none it raises whatever Python has to say to it."""
    graph = StageGraph(program, in_order=written["in_order"])
    planned = ((Stage(*map(tuple, indices)), count, ahead) for *indices, count, ahead in written["passes"])
    return StripPlan(
        graph, frozenset(written["in_host"]), planned_stages_of(graph, planned), StripPeak(*written["peak"])
    )
