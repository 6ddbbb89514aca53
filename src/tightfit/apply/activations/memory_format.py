"""Memory formats: convolution weights in channels-last order, which many convolution kernels prefer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(module: nn.Module) -> Callable[[], None]:
    """Convert every convolution kernel of `module` (4 or 5 dimensions) to channels last; return a function to undo it.

    The undo restores the original strides, also where another parameter has replaced the first one meanwhile (one read
    from a file, say).
    """
    before: list[tuple[nn.Module, str, torch.Size, tuple[int, ...]]] = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.ndim in _FORMATS:
                before.append((owner, name, parameter.shape, parameter.stride()))
    for owner, name, _, _ in before:
        kernel = owner._parameters[name]
        assert kernel is not None  # it was found there
        kernel.data = kernel.data.contiguous(memory_format=_FORMATS[kernel.ndim])

    def restore() -> None:
        for owner, name, shape, strides in before:
            kernel = owner._parameters.get(name)
            if kernel is not None and kernel.shape == shape and kernel.stride() != strides:
                data = torch.empty_strided(shape, strides, dtype=kernel.dtype, device=kernel.device)
                kernel.data = data.copy_(kernel.data)

    return restore
