"""Exceptions of tightfit. Each message says what is wrong, with the values, and what would work.

TightfitError                   base class; has the values of the message in `.facts`
├── InputError (ValueError)     invalid arguments                         exit code 2
│   ├── RequestError            a size, step count or prompt that the pipeline does not accept
│   ├── PlanError               an invalid or unknown field, level, technique or component
│   │   └── CacheError          a step cache that a network does not take
│   └── ModelError              a model folder or file that cannot be used
├── BudgetTooSmall              no plan fits the budget                   exit code 3
└── RunError (RuntimeError)     the run itself failed                     exit code 1
    └── AlreadyFitted           not possible while the pipeline follows its current plan
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AlreadyFitted",
    "BudgetTooSmall",
    "CacheError",
    "InputError",
    "ModelError",
    "PlanError",
    "RequestError",
    "RunError",
    "TightfitError",
    "unknown_name",
]

MOST_NAMES = 100  # in a message


class TightfitError(Exception):
    """Base class of all tightfit errors. `facts` holds the numbers and names of the message, for JSON output."""

    exit_code = 1

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


class InputError(TightfitError, ValueError):
    """Invalid arguments. Exit code 2 on the command line."""

    exit_code = 2


class RequestError(InputError):
    """A size, step count, prompt or other argument that the pipeline does not accept. Exit code 2."""


class PlanError(InputError):
    """An invalid or unknown field of a plan, level, technique or component. Exit code 2."""


class ModelError(InputError):
    """A model folder or file that cannot be used; the message names it, and the tensor. Exit code 2."""


class CacheError(PlanError):
    """A step cache that a network does not take."""


class BudgetTooSmall(TightfitError):
    """No plan fits the budget. Exit code 3.

    The message says what would do, and `facts` in bytes: `needed_bytes` of the device, or `needed_devices` by name,
    and `needed_ram`; None where no amount would do.
    """

    exit_code = 3


class RunError(TightfitError, RuntimeError):
    """The run itself failed, or something was asked for that is not possible now. Exit code 1."""


class AlreadyFitted(RunError):
    """Not possible while the pipeline follows its current plan: `undo()` first. Exit code 1."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown `name`: with the closest known one, or those known if none is close.

    >>> unknown_name("technique", "fp9", ["blended-tiling", "fp8"])
    "unknown technique 'fp9': did you mean 'fp8'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"unknown {what} {name!r}: did you mean {near[0]!r}?"
    shown = ", ".join(names[:MOST_NAMES]) or "none"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"unknown {what} {name!r}: there {'is' if len(names) == 1 else 'are'} {shown}{more}"
