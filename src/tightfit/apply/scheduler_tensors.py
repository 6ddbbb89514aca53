"""Tensors that a pipeline's schedulers compute with: calls move them to the pipeline's device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tightfit.errors import RunError

__all__ = ["bring_back"]


def bring_back(pipe: Any, undo: Callable[..., object]) -> None:
    """Pass to `undo` how to move the tensors of each scheduler of `pipe` to where they are now; new ones, to the host.

    Other pipelines may have the same scheduler: their calls would find part of its tensors on a card.
    """
    for part in getattr(pipe, "components", {}).values():
        if hasattr(part, "step") and not isinstance(part, nn.Module):
            devices = {name: each.device for name, each in vars(part).items() if isinstance(each, torch.Tensor)}
            undo(_bring_back, part, devices)


def _bring_back(scheduler: Any, devices: dict[str, torch.device]) -> None:
    for name, value in vars(scheduler).items():
        home = devices.get(name, torch.device("cpu"))
        if isinstance(value, list):  # what earlier steps computed
            value[:] = [_at(home, each) for each in value]
        else:
            setattr(scheduler, name, _at(home, value))


def _at(home: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device != home:
        with contextlib.suppress(RunError):  # a simulated card that keeps shapes has no numbers to give
            return value.to(home)
    return value
