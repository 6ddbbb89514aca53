"""ATen operations and their arguments as JSON: everything of a network that may be written to a file and read back.

Arguments are plain JSON; values without a JSON form are objects with one key: `{"value": 3}` (a tensor, by its number),
`{"dtype": "float16"}`, `{"device": "here"}` (the device the network runs on), `{"number": "-inf"}`. Whatever a file
contains, only ATen operations on tensors can result from it: torch's own reader of exported programs looks up any
function of torch by its name, even `torch.os.system`, and evaluates expressions.
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
    """Return torch's operation `name`, e.g. "aten.linear.default"; ModelError for anything else and for file access."""
    space, _, rest = name.partition(".")
    word, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, word, None), overload, None) if space == "aten" else None
    if not isinstance(found, torch._ops.OpOverload) or name in _TOUCHES_FILES:
        raise ModelError(f"the graph uses {name!r:.60}, which is no operation on tensors that torch has", name=name)
    return found


def written_argument(value: Any, number: Callable[[Any], int | None]) -> Any:
    """Return `value`, an argument of an operation, as JSON. `number` maps the placeholder of a tensor to its number.

    `number` returns None for anything else. ModelError for values without a JSON form.
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
    """Return the argument that the JSON `value` encodes, with `made(number)` for tensors and `here` for the device.

    ModelError for an unknown object.
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
