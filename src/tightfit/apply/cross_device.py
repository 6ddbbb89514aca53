"""What a component is given comes to its device, what it returns goes to its pipeline's, where that is another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.apply.weights.weight_store import HOST
from tightfit.devices.device import Device

__all__ = ["CrossDeviceCall"]


class CrossDeviceCall:
    """The way from a pipeline's device, the `host`, to a component's own, and back.

    From host memory, too: some pipelines pass on tensors as their user gave them. The two devices may be one.
    """

    def __init__(self, host: Device, own: Device) -> None:
        self._host, self._own = host.torch_device, own.torch_device
        self._elsewhere = {self._host, HOST} - {self._own}

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
        return _moved(value, self._elsewhere, self._own)

    def _back(self, value: Any) -> Any:
        return value if self._own == self._host else _moved(value, {self._own}, self._host)


def _moved(value: Any, sources: Container[torch.device], target: torch.device) -> Any:
    """`value` with the tensors in it that are on one of `sources` on `target`; the same object where there are none."""
    if isinstance(value, torch.Tensor):
        return value.to(target, non_blocking=True) if _goes(value, sources) else value
    if isinstance(value, Mapping):
        moved = {key: _moved(item, sources, target) for key, item in value.items()}
        same = all(moved[key] is item for key, item in value.items())
        return value if same else moved if type(value) is dict else type(value)(**moved)
    if isinstance(value, list | tuple):
        items = [_moved(item, sources, target) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    held = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
    tensors = {name: item for name, item in held.items() if isinstance(item, torch.Tensor) and _goes(item, sources)}
    if tensors:  # a distribution, say
        value = copy.copy(value)
        for name, item in tensors.items():
            setattr(value, name, item.to(target, non_blocking=True))
    return value


def _goes(tensor: torch.Tensor, sources: Container[torch.device]) -> bool:
    """Whether it has to move. Single numbers in host memory need not: kernels take them from there."""
    return tensor.device in sources and (tensor.ndim > 0 or tensor.device != HOST)
