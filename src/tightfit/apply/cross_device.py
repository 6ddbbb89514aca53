"""Move a component's inputs to its device, and its outputs to the pipeline's device, where that is another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.apply.weights.weight_store import HOST
from tightfit.devices.device import Device

__all__ = ["CrossDeviceCall", "with_tensors"]


class CrossDeviceCall:
    """Moves inputs from a pipeline's device, `host`, to a component's, `own`, and outputs back.

    Inputs in host memory are moved too: some pipelines pass tensors on as their user gave them. Both devices may be
    the same.
    """

    def __init__(self, host: Device, own: Device) -> None:
        self._host, self._own = host.torch_device, own.torch_device
        self._elsewhere = {self._host, HOST} - {self._own}

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `work`: move its arguments to the component's device, and its result to the pipeline's."""

        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._back(work(*self._there(args), **self._there(kwargs)))

        return run

    def watch(self, part: nn.Module, alone: Callable[[], bool], undo: Callable[..., object]) -> None:
        """Register hooks that do the same for `part` while `alone()` is true; `undo` receives how to remove them."""

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
    """Return `value` with its tensors on `sources` moved to `target`; the same object where there are none."""
    return with_tensors(
        value, lambda tensor: tensor.to(target, non_blocking=True) if _goes(tensor, sources) else tensor
    )


def with_tensors(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each of its tensors replaced by `move` of it; the same object where all stay the same.

    Tensors in mappings, lists and tuples count, and those that are attributes of an object, e.g. of a distribution.
    """
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, Mapping):
        moved = {key: with_tensors(item, move) for key, item in value.items()}
        same = all(moved[key] is item for key, item in value.items())
        return value if same else moved if type(value) is dict else type(value)(**moved)
    if isinstance(value, list | tuple):
        items = [with_tensors(item, move) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    held = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
    pairs = [(name, item, move(item)) for name, item in held.items() if isinstance(item, torch.Tensor)]
    if any(there is not item for _, item, there in pairs):
        value = copy.copy(value)
        for name, _, there in pairs:
            setattr(value, name, there)
    return value


def _goes(tensor: torch.Tensor, sources: Container[torch.device]) -> bool:
    """Whether `tensor` has to be moved. Zero-dimensional tensors in host memory need not: kernels read them there."""
    return tensor.device in sources and (tensor.ndim > 0 or tensor.device != HOST)
