"""Operations of ATen and their arguments in words: all of a network's work that may be written to a file, and read.

Arguments are plain JSON; what JSON has no word for is a mapping of one key: `{"value": 3}` (a tensor, by its number),
`{"dtype": "float16"}`, `{"device": "here"}` (where the network works), `{"number": "-inf"}`.
Whatever a file says, nothing but operations of ATen on tensors can come of it: torch's own reader of exported
programs looks any function of torch up by its name, `torch.os.system` too, and evaluates expressions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightfit.apply.activations.exporting import HERE
from tightfit.errors import ModelError

__all__ = ["find_operation", "read_argument", "written_argument"]

_TOUCHES_FILES = {"aten.from_file.default", "aten.from_file.out"}
_NAMED: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@functools.cache
def find_operation(name: str) -> torch._ops.OpOverload:
    """The operation that torch knows as `name`, e.g. "aten.linear.default"; ModelError for anything else."""
    space, _, rest = name.partition(".")
    word, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, word, None), overload, None) if space == "aten" else None
    if not isinstance(found, torch._ops.OpOverload) or name in _TOUCHES_FILES:
        raise ModelError(f"the graph uses {name!r:.60}, which is no operation on tensors that torch has", name=name)
    return found


def written_argument(value: Any, number: Callable[[Any], int | None]) -> Any:
    """`value`, an argument of an operation, as JSON. `number` knows what stands for a tensor by its number.

    ModelError for what has no word.
    """
    if (known := number(value)) is not None:
        return {"value": known}
    match value:
        case list() | tuple():
            return [written_argument(item, number) for item in value]
        case float() if not math.isfinite(value):
            return {"number": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case torch.device(type="meta" | "cpu"):
            return {"device": "here" if value.type == HERE else "cpu"}
    for word, kind in _NAMED.items():
        if isinstance(value, kind):
            return {word: str(value).removeprefix("torch.")}
    raise ModelError(f"the network uses {value!r:.60} ({type(value).__name__}), which cannot be exported")


def read_argument(value: Any, made: Callable[[int], Any], here: Any) -> Any:
    """The argument that `value`, JSON, stands for: with what is `made` of a tensor's number, and `here` for the place.

    ModelError for what stands for nothing.
    """
    if isinstance(value, list):
        return [read_argument(item, made, here) for item in value]
    return _named(value, made, here) if isinstance(value, dict) else value


def _named(value: dict[str, Any], made: Callable[[int], Any], here: Any) -> Any:
    match value:
        case {"value": int(number)}:
            return made(number)
        case {"number": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case {"device": "here"}:
            return here
        case {"device": "cpu"}:
            return torch.device("cpu")
    word, name = next(iter(value.items()), ("", ""))
    found = getattr(torch, str(name), None)
    if word in _NAMED and isinstance(found, _NAMED[word]):
        return found
    raise ModelError(f"the graph has an argument {value!r:.60}, which stands for nothing known")
