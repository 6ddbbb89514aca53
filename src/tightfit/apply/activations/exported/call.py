"""A call's arguments by name: tensors and settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightfit.apply.activations.exported.file import Manifest, TensorForm
from tightfit.errors import RequestError

__all__ = ["by_name", "check_call", "split"]


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, with defaults for omitted ones. TypeError as the call would raise."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if further else {name: value}
    return named


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors among `arguments`, and all other values; items of containers by dotted name, in torch's order.

    RequestError for values that are neither tensors nor plain.
    """
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        for path, item in _flatten(name, value):
            if isinstance(item, torch.Tensor):
                tensors[path] = item
            elif item is None or isinstance(item, bool | int | float | str | list | tuple | dict):
                settings[path] = list(item) if isinstance(item, tuple) else item  # containers here are empty
            else:
                kind = type(item).__name__
                raise RequestError(f"{path} is of type {kind}, which an exported denoiser cannot be given", input=path)
    return tensors, settings


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}", item)
    elif isinstance(value, list | tuple) and value:
        for place, item in enumerate(value):
            yield from _flatten(f"{name}.{place}", item)
    else:
        yield name, value


def check_call(manifest: Manifest, arguments: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.device]:
    """Return a call's tensors and their device. RequestError, naming the input, if it differs from the exported call.

    Zero-dimensional tensors may be on another device, as in torch's operations.
    """
    tensors, settings = split(arguments)
    given, taken = {**tensors, **settings}, {**manifest.inputs, **manifest.settings}
    for name in dict.fromkeys((*taken, *given)):
        here, there = _said(given, name), _said(taken, name)
        if here != there:
            raise _other(name, here, there)
    device = next((tensor.device for tensor in tensors.values() if tensor.ndim), torch.device("cpu"))
    for name, tensor in tensors.items():
        if tensor.ndim and tensor.device != device:
            raise _other(name, f"on {tensor.device}", f"all on one device, and the first is on {device}")
    return tensors, device


def _said(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not given"
    value = values[name]
    return str(TensorForm.of(value)) if isinstance(value, torch.Tensor) else str(value)


def _other(name: str, here: str, there: str) -> RequestError:
    return RequestError(
        f"{name} is {here}, the exported denoiser takes {there}: export it again for this request or leave traced out",
        input=name,
        given=here,
        exported=there,
    )
