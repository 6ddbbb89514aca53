"""What a component is given on another device goes to its own: what the pipeline made elsewhere, and the user's.

What it returns goes back where its pipeline is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.devices.seam import Device

__all__ = ["Crossing", "fetching"]

HOST = torch.device("cpu")


def fetching(work: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """`work` with all arguments on its `device`: some pipelines pass on what their user gave them, in host memory."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        return work(*_moved(args, HOST, device.torch_device), **_moved(kwargs, HOST, device.torch_device))

    return run


class Crossing:
    """The way from a pipeline's device, the `host`, to a component's own, and back."""

    def __init__(self, host: Device, own: Device) -> None:
        self._host, self._own = host.torch_device, own.torch_device

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work` with its arguments on the component's device, and its result on the host."""

        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._back(work(*self._there(args), **self._there(kwargs)))

        return run

    def watch(self, part: nn.Module, alone: Callable[[], bool], undo: Callable[..., object]) -> None:
        """The same for a `part` that is called by itself, which `alone` tells."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (self._there(args), self._there(kwargs)) if alone() else None

        def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            return self._back(result) if alone() else None

        undo(part.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo(part.register_forward_hook(after).remove)

    def _there(self, value: Any) -> Any:
        return _moved(value, self._host, self._own)

    def _back(self, value: Any) -> Any:
        return _moved(value, self._own, self._host)


def _moved(value: Any, source: torch.device, target: torch.device) -> Any:
    """`value` with the tensors in it that are on `source` on `target`; the same object where there are none.

    Single numbers in host memory may stay: kernels take them from there.
    """
    if isinstance(value, torch.Tensor):
        stays = value.device != source or (value.ndim == 0 and source == HOST)
        return value if stays else value.to(target, non_blocking=True)
    if isinstance(value, Mapping):
        moved = {key: _moved(item, source, target) for key, item in value.items()}
        same = all(moved[key] is item for key, item in value.items())
        return value if same else moved if type(value) is dict else type(value)(**moved)
    if isinstance(value, list | tuple):
        items = [_moved(item, source, target) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    held = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
    tensors = {name: item for name, item in held.items() if isinstance(item, torch.Tensor) and item.device == source}
    if tensors:  # a distribution, say
        value = copy.copy(value)
        for name, item in tensors.items():
            setattr(value, name, item.to(target, non_blocking=True))
    return value
