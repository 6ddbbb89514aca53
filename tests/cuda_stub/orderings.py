"""Every wait, event and ordering in tightfit's sources, and what a function is without one of them."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

__all__ = ["Ordering", "all_orderings", "leave_out"]

SRC = Path(__file__).parents[2] / "src" / "tightfit"
ELSEWHERE = {"pretend.py"}  # simulated cards have waits of their own
TIMING = "seconds"  # the method that times work
WAITS = {
    "abandon", "follow", "land", "mark", "precede", "record_event", "sent", "settle", "synchronize", "wait_event",
    "wait_stream",
}  # fmt: skip
OTHERS = {"self._housing.settle", "_replacement.settle", "self.follow", "follower.follow", "count.sent"}
COPYING = re.compile(r"devices/|apply/weights/|apply/again")  # where `after` is a mark
MARKER = "_ordering_was_left_out"


@dataclass(frozen=True)
class Ordering:
    """One expression in a function of a module."""

    file: str  # below src/tightfit
    function: str  # its qualified name
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.text}"


def all_orderings() -> list[Ordering]:
    found = []
    for folder in ("devices", "apply"):
        for file in sorted((SRC / folder).rglob("*.py")):
            if file.name not in ELSEWHERE:
                name = str(file.relative_to(SRC))
                found += [
                    Ordering(name, function, node.lineno, node.col_offset, ast.unparse(node))
                    for function, top in _functions(ast.parse(file.read_text()))
                    if function.rpartition(".")[2] != TIMING
                    for node in _orderings_in(top, marks=COPYING.match(name) is not None)
                ]
    return found


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods; what is inside of another function belongs to that."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def _orderings_in(function: ast.FunctionDef, *, marks: bool) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and name not in OTHERS:
            yield node
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        yield from (each for each in given if marks and ast.unparse(each).rpartition(".")[2] in {"after", "_after"})


class _WithoutOne(ast.NodeTransformer):
    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering

    def visit(self, node: ast.AST) -> Any:
        at = self.ordering
        here = isinstance(node, ast.expr) and (node.lineno, node.col_offset) == (at.line, at.column)
        if not here or ast.unparse(node) != at.text:
            return self.generic_visit(node)
        given: list[ast.expr] = [ast.Constant(0.0 if at.text.endswith("settle()") else None)]  # seconds
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given.append(node.func.value)  # what it is asked of is there all the same
        marked = ast.Call(ast.Name(MARKER, ast.Load()), given, [])
        return ast.fix_missing_locations(ast.copy_location(marked, node))


def leave_out(ordering: Ordering, reached: Callable[[], None]) -> None:
    """From now on the function does without, in this process; `reached` is called where it would have been."""
    tree = _WithoutOne(ordering).visit(copy.deepcopy(ast.parse((SRC / ordering.file).read_text())))
    module = importlib.import_module("tightfit." + ordering.file.removesuffix(".py").replace("/", "."))

    def marker(value: Any, asked: Any = None) -> Any:
        reached()
        return value

    setattr(module, MARKER, marker)
    function = _function_named(module, ordering.function)
    function.__code__ = _code_named(compile(tree, str(SRC / ordering.file), "exec"), ordering.function)


def _function_named(module: Any, name: str) -> FunctionType:
    *classes, last = name.split(".")
    holder = functools.reduce(getattr, classes, module)
    found = inspect.getattr_static(holder, last)
    while not (isinstance(found, FunctionType) and found.__qualname__ == name and not hasattr(found, "__wrapped__")):
        found = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None) or found.fget
    return found


def _code_named(code: CodeType, name: str) -> CodeType:
    for part in name.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
    return code
