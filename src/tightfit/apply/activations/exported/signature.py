"""What identifies a network and a call of it: classes, settings, weight shapes, library versions; arguments by name."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import nn

from tightfit.apply.activations.exported.file import Manifest, TensorForm
from tightfit.errors import AlreadyFitted, ModelError, RequestError
from tightfit.measure.modules import HANDLE

__all__ = ["by_name", "check_call", "check_marks", "check_plain", "marks_of", "split"]


_LIBRARIES = ("torch", "diffusers", "tightfit")


def marks_of(module: nn.Module) -> dict[str, Any]:
    """Return the fields of a Manifest that identify `module`."""
    parameters = module.named_parameters(remove_duplicate=False)  # a shared weight has all of its names
    weights = (*parameters, *module.named_buffers(remove_duplicate=False))
    return {
        "versions": _versions(),
        "class_name": type(module).__name__,
        "config": _config(module),
        "weights": {name: TensorForm.of(tensor) for name, tensor in weights},
        "parts": {path: f"{type(part).__name__} {_digest(part)}" for path, part in module.named_modules()},
    }


def check_marks(module: nn.Module, manifest: Manifest) -> None:
    """Raise ModelError, saying what differs, if `module` or a library is not what `manifest` was made with."""
    kind, now = type(module).__name__, marks_of(module)
    _compare("{}", manifest.versions, now["versions"])
    _compare("{}", {"the class": manifest.class_name}, {"the class": kind})
    _compare(f"{kind}.config.{{}}", manifest.config, now["config"])
    _compare(f"{kind}.{{}}", manifest.weights, now["weights"])
    _compare(f"the settings of {kind}.{{}}", manifest.parts, now["parts"])


def _compare(what: str, then: Mapping[str, object], now: Mapping[str, object]) -> None:
    for name in dict.fromkeys((*then, *now)):
        was, found = then.get(name, "nothing"), now.get(name, "nothing")
        if was != found:
            what = what.format(name).removesuffix(".")
            raise ModelError(
                f"the denoiser was exported with {what} = {was!s:.80}, and here it is {found!s:.80}: export it again",
                what=what,
            )


def check_plain(module: nn.Module) -> None:
    """Raise ModelError or AlreadyFitted if `module` follows a plan, trains, is hooked or is compiled."""
    kind = type(module).__name__
    if hasattr(module, HANDLE):
        raise AlreadyFitted(f"{kind} follows a plan: undo() that one first", name=kind)
    for path, part in module.named_modules():
        where = f"{kind}.{path}".removesuffix(".")
        if part.training:
            raise ModelError(f"{where} is in training, where it drops out at random: call eval() first", name=where)
        if part._forward_pre_hooks or part._forward_hooks or "forward" in vars(part):
            raise ModelError(f"{where} has hooks, which an exported denoiser would pass over: remove them", name=where)
        if part._compiled_call_impl is not None:
            raise ModelError(f"{where} is compiled: leave that or exported out", name=where)


@functools.cache
def _versions() -> dict[str, str]:
    """Library versions without the suffix for the device that torch was built for: operations are the same for all."""
    return {library: version(library).partition("+")[0] for library in _LIBRARIES}


def _config(module: nn.Module) -> dict[str, Any]:
    """The configuration without private entries, which record where it comes from."""
    config = getattr(module, "config", None)
    items = config.items() if isinstance(config, Mapping) else ()
    settings = {key: value for key, value in items if not key.startswith("_")}
    return cast(dict[str, Any], json.loads(json.dumps(settings, default=repr)))


def _digest(part: nn.Module) -> str:
    """Digest of its plain attributes, and of the classes of its other ones (an attention processor, say)."""
    facts = [f"{key}={_plain(value)}" for key, value in sorted(vars(part).items()) if not key.startswith("_")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    return type(value).__name__


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
        f"{name} is {here}, the exported denoiser takes {there}: export it again for this request, or leave out the "
        "plan's field exported",
        input=name,
        given=here,
        exported=there,
    )
