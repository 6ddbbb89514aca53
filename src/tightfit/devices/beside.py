"""Copies from one CUDA card to another that the first does not wait for."""

from __future__ import annotations

import torch

from tightfit.devices.pinned_pool import is_dense

__all__ = ["copy_beside"]

_streams: dict[torch.device, torch.cuda.Stream] = {}  # of the copies, by the device that is copied from


def copy_beside(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Return a copy of `tensor` on the CUDA device `target`, another one than its own: see `Device.copy_beside`."""
    source = tensor if is_dense(tensor) else tensor.clone()
    if source.device not in _streams:
        _streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
    stream = _streams[source.device]
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        copy = source.to(target, non_blocking=True)
    source.record_stream(stream)
    return copy
