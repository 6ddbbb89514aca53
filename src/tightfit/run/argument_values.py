"""An argument of a pipeline's call → a description of all that affects memory; and a copy or dummy to simulate with.

Descriptions hold kinds and sizes, never contents, so that the measurements of one call are found for similar calls.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

__all__ = ["GREY", "Given", "described", "dummy_value"]

LONG_TEXT = 256  # characters; lengths of longer texts are rounded up to a multiple of this
GREY = (127, 127, 127)
FEW = 8  # items of a list of numbers; longer lists are described by their length
LARGE = 2**24  # elements of a tensor; values of larger ones are not copied
_WORDS = ("prompt", "caption", "lyrics", "text", "query", "instruction")  # parts of the names of text arguments

Described = bool | int | float | str | None


def described(name: str, value: Any) -> Described:
    """Describe the argument `name`: plain values as they are, others as "RGB image 64x64" or "float32 1x4x8x8"."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return next((words(name, value) for kind, words in _IN_WORDS.items() if isinstance(value, kind)), _fields(value))


def _fields(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} {_mapping('', vars(value))}" if is_dataclass(value) else kind


def _mapping(name: str, values: Mapping[Any, Any]) -> str:
    return f"{{{', '.join(f'{key}: {described(str(key), item)}' for key, item in values.items())}}}"


def _several(name: str, values: list[Any] | tuple[Any, ...]) -> str:
    if values and all(isinstance(value, str) and _is_text(name, value) for value in values):
        return _text(max(map(len, values)))  # their number is part of the request's batch
    if len(values) > FEW and all(isinstance(value, int | float) for value in values):
        return f"{len(values)} numbers"
    items = [str(described(name, value)) for value in values]
    return f"{len(items)} x {items[0]}" if len(items) > 1 and len(set(items)) == 1 else f"[{', '.join(items)}]"


_IN_WORDS: dict[type, Callable[[str, Any], str]] = {
    str: lambda name, value: _text(len(value)) if _is_text(name, value) else value,
    torch.Tensor: lambda name, value: f"{str(value.dtype).removeprefix('torch.')} {_size(value.shape)}",
    np.ndarray: lambda name, value: f"{value.dtype} array {_size(value.shape)}",
    Image.Image: lambda name, value: f"{value.mode} image {_size(value.size)}",
    list: _several,
    tuple: _several,
    dict: _mapping,
}


def _is_text(name: str, value: str) -> bool:
    return any(word in name for word in _WORDS) or " " in value


def _text(length: int) -> str:
    return "text" if length <= LONG_TEXT else f"text of up to {-(-length // LONG_TEXT) * LONG_TEXT} characters"


def _size(lengths: Any) -> str:
    return "x".join(map(str, lengths))


class Given(NamedTuple):
    """Arguments of a call that runs on a device."""

    arguments: Mapping[str, Any]  # by the pipeline's parameter names
    device: torch.device

    def simulation_copy(self, target: torch.device) -> dict[str, Any]:
        """Copy the arguments for a simulation: tensors on the call's device move to `target`; callbacks are left out.

        Long texts are padded to the longest of the same description; large tensors keep only shape and strides.
        """
        given = {name: value for name, value in self.arguments.items() if not name.startswith("callback")}
        return {name: _simulated(name, value, self.device, target) for name, value in given.items()}


def _simulated(name: str, value: Any, source: torch.device, target: torch.device) -> Any:
    def inside(item: Any, key: str = name) -> Any:
        return _simulated(key, item, source, target)

    copied: Any = value
    if isinstance(value, str):
        copied = _stretched(value) if _is_text(name, value) else value
    elif isinstance(value, torch.Generator):
        copied = _generator(value, target)
    elif isinstance(value, torch.Tensor):
        copied = _tensor(value, target if value.device == source else value.device, target)
    elif isinstance(value, Image.Image | np.ndarray):
        copied = value.copy()
    elif type(value) in (list, tuple):
        copied = type(value)(map(inside, value))
    elif isinstance(value, dict):
        copied = {key: inside(item, str(key)) for key, item in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field, item in vars(value).items():
            object.__setattr__(copied, field, inside(item, field))
    return copied


def dummy_value(what: Described) -> Any:
    """Return a value whose description is `what`: grey images, zeros; other values as they are."""
    if not isinstance(what, str):
        return what
    if several := re.fullmatch(r"(\d+) x (.+)", what):
        return [dummy_value(several[2])] * int(several[1])
    if image := re.fullmatch(r"(\w+) image (\d+)x(\d+)", what):
        return Image.new("RGB", (int(image[2]), int(image[3])), GREY).convert(image[1])
    if array := re.fullmatch(r"(\w+)( array)? ((\d+)(x\d+)*)", what):
        dtype, shape = getattr(torch, array[1], None), tuple(map(int, array[3].split("x")))
        if isinstance(dtype, torch.dtype):
            zeros = torch.zeros(shape, dtype=dtype)
            return zeros.numpy() if array[2] else zeros
    if long := re.fullmatch(r"text of up to (\d+) characters", what):
        return "text " * (int(long[1]) // len("text "))
    return what


def _stretched(text: str) -> str:
    """Pad a long `text` to the longest length with the same description."""
    if len(text) <= LONG_TEXT:
        return text
    filled = text + " and" * LONG_TEXT
    return filled[: -(-len(text) // LONG_TEXT) * LONG_TEXT]


def _generator(generator: torch.Generator, target: torch.device) -> torch.Generator:
    if generator.device.type != "cpu":
        return torch.Generator(target)
    double = torch.Generator()
    double.set_state(generator.get_state())
    return double


def _tensor(tensor: torch.Tensor, place: torch.device, target: torch.device) -> torch.Tensor:
    large, tensor = tensor.numel() > LARGE, tensor.detach()
    if place == target:
        if large or tensor.is_meta:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target)
        return tensor.to("cpu", copy=True).to(target)
    if not large:
        return tensor.clone()
    pages = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8)  # takes no memory until it is written
    return pages.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
