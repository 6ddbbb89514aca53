"""A call's arguments by name: tensors, and the settings beside them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightfit.apply.activations.traced.file import Manifest, TensorForm
from tightfit.errors import RequestError

__all__ = ["by_name", "check_call", "split"]


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names, those left out with their defaults. TypeError as the call would."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if further else {name: value}
    return named


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors among `arguments`, and all else: what is inside of containers by dotted names, in torch's order.

    RequestError for what is neither a tensor nor a plain value.
    """
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        for path, item in _layers(name, value):
            if isinstance(item, torch.Tensor):
                tensors[path] = item
            elif item is None or isinstance(item, bool | int | float | str | list | tuple | dict):
                settings[path] = list(item) if isinstance(item, tuple) else item  # of containers only empty ones
            else:
                kind = type(item).__name__
                raise RequestError(f"{path} is of type {kind}, which an exported denoiser cannot be given", input=path)
    return tensors, settings


def _layers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _layers(f"{name}.{key}", item)
    elif isinstance(value, list | tuple) and value:
        for place, item in enumerate(value):
            yield from _layers(f"{name}.{place}", item)
    else:
        yield name, value


def check_call(manifest: Manifest, arguments: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.device]:
    """The tensors of a call and their device. RequestError, naming the input, for another call than was exported.

    Single numbers may be on another device, as operations let them.
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
