"""What `undo()` must leave untouched, taken down before and compared after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.measure.modules import find_components

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


@dataclass(frozen=True)
class Imprint:
    """A pipeline at one moment: classes, attributes, hooks, and every tensor's identity, form and values."""

    classes: tuple[type, ...]
    attributes: tuple[frozenset[str], ...]
    hooks: tuple[int, ...]
    forwards: tuple[Any, ...]
    tensors: tuple[tuple[str, int, torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]], ...]
    values: tuple[torch.Tensor, ...]


def imprint(pipe: Any) -> Imprint:
    modules = [m for part in find_components(pipe).values() for m in part.modules()]
    objects = [pipe, *modules]
    named = [
        (f"{name}.{key}", tensor)
        for name, part in find_components(pipe).items()
        for key, tensor in [*part.named_parameters(), *part.named_buffers()]
    ]
    return Imprint(
        classes=tuple(map(type, objects)),
        attributes=tuple(frozenset(vars(o)) for o in objects),
        hooks=tuple(len(getattr(m, kind)) for m in modules for kind in _HOOKS),
        forwards=tuple(m.forward.__func__ for m in modules if not isinstance(m, nn.ModuleList | nn.ModuleDict)),
        tensors=tuple((k, id(t), t.dtype, t.device, tuple(t.shape), t.stride()) for k, t in named),
        values=tuple(t.detach().clone() for _, t in named),
    )


def assert_same(before: Imprint, after: Imprint) -> None:
    assert all(now is then for now, then in zip(after.classes, before.classes, strict=True))
    assert after.attributes == before.attributes
    assert after.hooks == before.hooks
    assert after.forwards == before.forwards
    assert after.tensors == before.tensors
    assert all(torch.equal(old, new) for old, new in zip(before.values, after.values, strict=True))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())
