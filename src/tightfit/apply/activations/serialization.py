"""What is written of a network to a file: operations and arguments as JSON, in a zip archive of text and tensors."""

from __future__ import annotations

import functools
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tightfit.apply.activations.exporting import HERE
from tightfit.errors import ModelError
from tightfit.files import check_regular, replacing

__all__ = [
    "DAMAGED",
    "find_operation",
    "open_bundle",
    "part_of",
    "read_argument",
    "write_bundle",
    "written_argument",
]


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


LARGEST_PART = 2**30  # bytes; the graph of a large denoiser takes a few MB

# exceptions raised by reading a file that is incomplete, damaged or no bundle
DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, RuntimeError, SafetensorError)


def write_bundle(path: Path, parts: Mapping[str, str | bytes]) -> None:
    """Write `parts`, by name, to the file `path`, completely or not at all. OSError on failure."""
    with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, content in parts.items():  # no timestamp: equal content gives equal bytes
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def open_bundle(path: Path) -> zipfile.ZipFile:
    """Open the file `path` that `write_bundle` wrote. OSError if it is missing, or no file but a pipe or a folder."""
    check_regular(path)
    return zipfile.ZipFile(path)


def part_of(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the part `name`; raise one of DAMAGED if it is missing, broken or larger than LARGEST_PART."""
    size = archive.getinfo(name).file_size
    if size > LARGEST_PART:
        raise ValueError(f"{name} would have {size} bytes")
    return archive.read(name)
