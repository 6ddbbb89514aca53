"""Memory formats: convolution weights with channels last, which many convolution kernels want."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(module: nn.Module) -> Callable[[], None]:
    """Lays every convolution kernel of `module` out with channels last; returns how to restore each as it was."""
    strides: list[tuple[nn.Parameter, tuple[int, ...]]] = []
    for parameter in module.parameters():
        if parameter.ndim in _FORMATS:
            strides.append((parameter, parameter.stride()))
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.ndim])

    def restore() -> None:
        for parameter, stride in strides:
            data = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device)
            parameter.data = data.copy_(parameter.data)

    return restore
