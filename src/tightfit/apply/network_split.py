"""Run a network whose blocks are on several devices: tensors are copied to the device of whatever module takes them.

A tensor that several modules of a device take (a time embedding, a table of positions) is copied once, as long as the
network keeps it and does not write to it. What the code between blocks combines of two devices is copied too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tightfit.apply.cross_device import with_tensors
from tightfit.apply.module_hooks import wrap
from tightfit.devices.device import Device
from tightfit.measure.modules import find_blocks, has_skips
from tightfit.plan.network_parts import block_order, part_finder
from tightfit.schema.plan import ComponentPlan

__all__ = ["NetworkSplit", "split_network"]


def split_network(
    network: nn.Module, chosen: ComponentPlan, devices: Sequence[Device], undo: Callable[..., object]
) -> None:
    """Run the parts of `network` by its plan `chosen`, each on one of `devices`; `undo` receives how to revert that."""
    order = block_order(find_blocks(network), has_skips=has_skips(network))
    finder = part_finder(order, [part.first for part in chosen.split.values()])
    NetworkSplit(network, finder, [device.torch_device for device in devices]).hook(undo)


class NetworkSplit:
    """Copies inputs of the modules of `network` between its `devices`, and its outputs to `devices[0]`.

    `part_of` returns the index of the part, and so of the device, to which the module at a path belongs.
    """

    def __init__(self, network: nn.Module, part_of: Callable[[str], int], devices: Sequence[torch.device]) -> None:
        self._network, self._devices = network, devices
        self._parts = {path: part_of(path) for path in _units(network)}
        self._copies = _Copies()
        self._between: _BetweenModules | None = None  # while the network runs and a tensor has left the first device
        self._active = False  # whether that is in effect: not within modules
        self._running = 0

    def hook(self, undo: Callable[..., object]) -> None:
        """Register hooks on the modules; `undo` receives how to remove them."""
        order = block_order(find_blocks(self._network), has_skips=has_skips(self._network))
        last = [path for path in order if self._parts.get(path)][-1]
        for path, index in self._parts.items():
            module = self._network.get_submodule(path)
            back = self._devices[0] if path == last else None
            if module._compiled_call_impl is None:
                undo(module.register_forward_pre_hook(self._before(index), with_kwargs=True).remove)
                undo(module.register_forward_hook(self._after(back), always_call=True).remove)
            else:
                wrap(module, functools.partial(self._around, index, back), undo)
        undo(self._network.register_forward_pre_hook(self._begin, prepend=True).remove)
        undo(self._network.register_forward_hook(self._end, always_call=True).remove)

    def _around(self, index: int, back: torch.device | None, work: Callable[..., Any]) -> Callable[..., Any]:
        before, after = self._before(index), self._after(back)

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = before(None, args, kwargs)
            result = None
            try:
                result = work(*args, **kwargs)
            finally:
                result = after(None, args, result)
            return result

        return run

    def _before(self, index: int) -> Callable[..., Any]:
        device = self._devices[index]

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            self._pause()
            there = self._to(device, args), self._to(device, kwargs)
            if index and self._running and self._between is None:
                self._between = _BetweenModules(self._devices, self._copies)
            if self._between is not None:
                self._between.device = device
            return there

        return before

    def _after(self, back: torch.device | None) -> Callable[..., Any]:
        def after(_: object, args: tuple[Any, ...], result: Any) -> Any:
            if back is not None:
                result = self._to(back, result)
                if self._between is not None:
                    self._between.device = back
            if self._between is not None and self._running and not self._active:
                self._between.__enter__()  # type: ignore[no-untyped-call]
                self._active = True
            return result

        return after

    def _pause(self) -> None:
        if self._active and self._between is not None:
            self._active = False
            self._between.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _begin(self, _: nn.Module, args: object) -> None:
        self._running += 1

    def _end(self, _: nn.Module, args: object, result: Any) -> Any:
        self._running = max(self._running - 1, 0)  # a hook before `_begin` may have failed
        if not self._running:
            self._pause()
            self._between = None
        result = self._to(self._devices[0], result)
        self._copies.clear()
        return result

    def _to(self, device: torch.device, value: Any) -> Any:
        return with_tensors(value, lambda tensor: self._moved(tensor, device))

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        stays = tensor.device == device or tensor.device not in self._devices
        return tensor if stays else self._copies.on(device, tensor)


class _Copies:
    """Copies of tensors on other devices, each kept as long as its source, unless that was written to."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def on(self, device: torch.device, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of `source` on `device`."""
        if source.is_inference():  # torch does not count writes to it
            return source.to(device, non_blocking=True)
        key = id(source), device
        found = self._kept.get(key)
        if found is not None and found[0]() is source and found[1] == source._version:
            return found[2]
        copy = source.to(device, non_blocking=True)
        kept = self._kept
        self._kept[key] = weakref.ref(source, lambda _: kept.pop(key, None)), source._version, copy
        return copy

    def clear(self) -> None:
        self._kept.clear()


class _BetweenModules(TorchFunctionMode):
    """Copies what an operation between modules takes from several of `devices` to the one that it is to run on.

    That is `device`, where the last module ran; an operation that writes to its first argument runs where that is.
    """

    def __init__(self, devices: Sequence[torch.device], copies: _Copies) -> None:
        super().__init__()
        self._devices, self._copies = set(devices), copies
        self.device = devices[0]

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        found = {tensor.device for tensor in tensors}.intersection(self._devices)
        if len(found) < 2 or _names_device(func):
            return func(*args, **kwargs)
        target = self.device
        if _writes(func, kwargs) or target not in found:
            target = tensors[0].device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            stays = tensor.device == target or tensor.device not in self._devices
            return tensor if stays else self._copies.on(target, tensor)

        return func(*with_tensors(tuple(args), move), **with_tensors(dict(kwargs), move))


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` writes to its first argument, or picks some of it."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name in ("__setitem__", "__getitem__")
        or (name.startswith("__i") and name != "__invert__")
        or "out" in kwargs
    )


def _names_device(func: Callable[..., Any]) -> bool:
    """Whether `func` copies from one device to another by itself."""
    return getattr(func, "__name__", "") in ("to", "type_as", "copy_")


def _units(network: nn.Module) -> Iterator[str]:
    """Yield the paths of the blocks of `network`, and of the outermost modules that have no blocks inside."""
    blocks = set(find_blocks(network))
    around = {path[:end] for path in blocks for end, sign in enumerate(path) if sign == "."}

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in around:
                yield from walk(child, f"{path}.")
            elif path in blocks or type(child).forward is not nn.Module.forward:
                yield path

    return walk(network, "")
