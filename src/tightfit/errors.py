"""The exceptions of tightfit. Every message says what was wrong, with the numbers, and what would work.

TightfitError                   base of all; carries its numbers in `.facts`
├── InputError (ValueError)     what was asked for is wrong               exit code 2
│   ├── RequestError            a size, step count or prompt that the pipeline cannot take
│   ├── PlanError               an illegal or unknown field, level, technique or component
│   └── ModelError              a model folder or file that cannot be used
├── BudgetTooSmall              the budget cannot hold the run            exit code 3
└── RunError (RuntimeError)     the run itself failed                     exit code 1
    └── AlreadyFitted           it follows a plan that stands in the way of what was asked
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AlreadyFitted",
    "BudgetTooSmall",
    "InputError",
    "ModelError",
    "PlanError",
    "RequestError",
    "RunError",
    "TightfitError",
    "unknown_name",
]


class TightfitError(Exception):
    """Base of all errors here. `facts` holds the numbers and names behind the message, ready for JSON."""

    exit_code = 1

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


class InputError(TightfitError, ValueError):
    exit_code = 2


class RequestError(InputError):
    pass


class PlanError(InputError):
    pass


class ModelError(InputError):
    pass


class BudgetTooSmall(TightfitError):
    exit_code = 3


class RunError(TightfitError, RuntimeError):
    pass


class AlreadyFitted(RunError):
    pass


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for an unknown `name`: with the nearest known one, or all of them where none is near.

    >>> unknown_name("technique", "fp9", ["blended-tiling", "fp8"])
    "unknown technique 'fp9': did you mean 'fp8'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"unknown {what} {name!r}: did you mean {near[0]!r}?"
    return f"unknown {what} {name!r}: there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
