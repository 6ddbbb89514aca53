"""Statements and modules of src/tightfit, docstrings not counted: python tools/count_statements.py [FOLDER]."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src/tightfit"


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    files = sorted(root.rglob("*.py"))
    counts: Counter[str] = Counter()
    for file in files:
        counts[file.relative_to(root).parts[0].removesuffix(".py")] += statements(ast.parse(file.read_text()))
    for name, count in counts.most_common():
        print(f"{count:6}  {name}")
    longest = max(files, key=lambda file: len(file.read_text().splitlines()))
    lines = len(longest.read_text().splitlines())
    print(f"{sum(counts.values()):6}  in {len(files)} modules; longest {longest.relative_to(root)}: {lines} lines")


if __name__ == "__main__":
    main()
