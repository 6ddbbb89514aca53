"""Activations that wait: a U-Net's skip connections spend the middle of each step in host memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tightfit.devices.seam import Device
from tightfit.measure.recorder import Recorder

__all__ = ["move_waiting"]

# a caller that passes these adds to the skips between the blocks, on the device: they stay there
_ADDED = ("down_block_additional_residuals", "down_intrablock_additional_residuals")


def move_waiting(module: Any, device: Device, recorder: Recorder, undo: ExitStack) -> None:
    """Sends what `module`'s down blocks leave for its up blocks to host memory until it is needed."""
    stays = False
    away_now: set[int] = set()  # which tensors wait in host memory

    def start(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal stays
        stays = any(kwargs.get(name) is not None for name in _ADDED)
        away_now.clear()

    def away(_: nn.Module, args: Any, output: Any) -> Any:
        if stays or not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], tuple)):
            return None
        with recorder.uncounted():
            stored = tuple(device.store(skip) for skip in output[1])
        recorder.moved(bytes_out=sum(skip.nbytes for skip in stored))
        away_now.update(map(id, stored))
        return output[0], stored

    def back(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        skips = kwargs.get("res_hidden_states_tuple")
        if stays or skips is None:
            return None
        recorder.moved(bytes_in=sum(skip.nbytes for skip in skips if id(skip) in away_now))
        return args, kwargs | {"res_hidden_states_tuple": tuple(map(bring, skips))}

    def bring(skip: torch.Tensor) -> torch.Tensor:
        if id(skip) not in away_now:
            return skip
        away_now.remove(id(skip))
        return device.bring(skip)

    undo.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    for block in module.down_blocks:
        undo.callback(block.register_forward_hook(away).remove)
    for block in module.up_blocks:
        undo.callback(block.register_forward_pre_hook(back, with_kwargs=True).remove)
