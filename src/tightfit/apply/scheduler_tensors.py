"""Tensors that a pipeline's schedulers compute with: calls move them to the pipeline's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
        if isinstance(value, torch.Tensor) and value.device != home:
            setattr(scheduler, name, value.to(home))
        elif isinstance(value, list):  # what earlier steps computed
            value[:] = [each.to(home) if isinstance(each, torch.Tensor) else each for each in value]
