"""Every wait, event and ordering in tightfit's sources, and what a function is without one of them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

__all__ = ["Ordering", "all_orderings", "leave_out", "notice"]

SRC = Path(__file__).parents[2] / "src" / "tightfit"
ELSEWHERE = {
    "simulated.py",  # simulated cards have waits of their own
    "host_overheads.py",  # its waits are for the sake of times alone
}
TIMING = re.compile(r"(.+\.)?seconds|\w*Device\.synchronize")  # methods that are called for the sake of times alone
NOT_ON_CARDS = {  # what other devices do instead, and how often in the function
    ("devices/copy_stream.py", "CopyStream.follow", 1),  # CudaCopyStream has its own
    ("devices/copy_stream.py", "_LateCopy.wait_on_device", 1),  # a stream of the tests
    ("apply/weights/disk_store.py", "DiskStore.send", 2),  # without a stager, which devices have that take threads
}
WAITS = {
    "cancel", "follow", "mark", "precede", "record_event", "sent", "settle", "synchronize", "wait_event",
    "wait_on_device", "wait_stream",
}  # fmt: skip
OTHERS = {  # of the same names, but no orderings of a card
    "_replacement.settle", "self.follow", "handle.follow", "self.handle.follow", "count.sent", "self._reading.cancel",
    "self._given.cancel", "log.follow",
}  # fmt: skip
COPYING = re.compile(r"devices/|apply/weights/|apply/output_replay")  # where `after` is a mark
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
                    if TIMING.fullmatch(function) is None
                    for number, node in enumerate(_in_order(top, marks=COPYING.match(name) is not None), 1)
                    if (name, function, number) not in NOT_ON_CARDS
                ]
    return found


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods; what is inside of another function belongs to that."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def _in_order(function: ast.FunctionDef, *, marks: bool) -> list[ast.expr]:
    return sorted(_orderings_in(function, marks=marks), key=lambda node: (node.lineno, node.col_offset))


def _orderings_in(function: ast.FunctionDef, *, marks: bool) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and name not in OTHERS:
            yield node
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        yield from (each for each in given if marks and ast.unparse(each).rpartition(".")[2] in {"after", "_after"})


class _Marked(ast.NodeTransformer):
    """With a call of the marker in place of each of `orderings`, or around it."""

    def __init__(self, orderings: list[Ordering], *, without: bool) -> None:
        self.numbers = {(each.line, each.column, each.text): number for number, each in enumerate(orderings)}
        self.without = without

    def visit(self, node: ast.AST) -> Any:
        number = None
        if isinstance(node, ast.expr):
            number = self.numbers.get((node.lineno, node.col_offset, ast.unparse(node)))
        if number is None:
            return self.generic_visit(node)
        text = ast.unparse(node)
        if self.without:
            what: ast.expr = ast.Constant(0.0 if text.endswith(("settle()", "wait_on_device()")) else None)  # seconds
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # what it is asked of is there
                what = ast.Subscript(ast.Tuple([node.func.value, what], ast.Load()), ast.Constant(1), ast.Load())
        else:
            what = self.generic_visit(node)
        said = ast.Call(ast.Name(MARKER, ast.Load()), [ast.Constant(number)], [])
        both = ast.Subscript(ast.Tuple([said, what], ast.Load()), ast.Constant(1), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(both, node))


def leave_out(ordering: Ordering) -> None:
    """From now on the function does without, in this process."""
    _change([ordering], lambda _: None, without=True)


def notice(orderings: list[Ordering], reached: Callable[[Ordering], None]) -> None:
    """From now on `reached` is called with each of `orderings`, just before it."""
    by_file: dict[str, list[Ordering]] = {}
    for each in orderings:
        by_file.setdefault(each.file, []).append(each)
    for found in by_file.values():
        _change(found, reached, without=False)


def _change(orderings: list[Ordering], reached: Callable[[Ordering], None], *, without: bool) -> None:
    """Of one file."""
    file = orderings[0].file
    tree = _Marked(orderings, without=without).visit(ast.parse((SRC / file).read_text()))
    code = compile(tree, str(SRC / file), "exec")
    module = importlib.import_module("tightfit." + file.removesuffix(".py").replace("/", "."))
    setattr(module, MARKER, lambda number: reached(orderings[number]))
    for name in {ordering.function for ordering in orderings}:
        _function_named(module, name).__code__ = _code_named(code, name)


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
