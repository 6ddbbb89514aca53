"""Identity of a network: its class, its settings, the shapes of its weights, the versions of its libraries."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import nn

from tightfit.apply.activations.exported.file import Manifest, TensorForm
from tightfit.errors import AlreadyFitted, ModelError
from tightfit.measure.modules import HANDLE

__all__ = ["check_marks", "check_plain", "marks_of"]

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
