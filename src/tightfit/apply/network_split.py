"""Run a network whose blocks are on several devices: tensors are copied to the device of whatever module takes them.

A tensor that several modules of a device take (a time embedding, a table of positions) is copied once, as long as the
network keeps it and does not write to it. What the code between blocks combines of two devices is copied too.

Where a batch is split into chunks, devices work at the same time: the first part of the network begins with the next
chunk while later parts are still at work on this one. For that no part waits for a later one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tightfit.apply.cross_device import with_tensors
from tightfit.apply.module_hooks import wrap
from tightfit.devices.device import Device
from tightfit.errors import PlanError, unknown_name
from tightfit.measure.modules import find_blocks, has_skips
from tightfit.measure.outer_modules import outer_modules
from tightfit.plan.network_parts import block_order, overlaps_parts, part_finder
from tightfit.schema.plan import ComponentPlan

__all__ = ["NetworkSplit", "split_network"]


def split_network(
    network: nn.Module, chosen: ComponentPlan, devices: Sequence[Device], undo: Callable[..., object]
) -> None:
    """Run the parts of `network` by its plan `chosen`, each on one of `devices`; `undo` receives how to revert that.

    Raises PlanError where a part names a module that the network does not have outside of its blocks.
    """
    blocks = find_blocks(network)
    order = block_order(blocks, has_skips=has_skips(network))
    outside = [path for path in outer_modules(network) if path not in blocks]
    for path in (path for part in chosen.split.values() for path in part.outside):
        if path not in outside:
            raise PlanError(
                unknown_name(f"module of {type(network).__name__} outside of blocks", path, outside), name=path
            )
    finder = part_finder(order, chosen.split.values())
    split = NetworkSplit(network, finder, devices, overlaps=overlaps_parts(chosen))
    split.hook(undo, returns=not any(part.outside for part in chosen.split.values()))


class NetworkSplit:
    """Copies inputs of the modules of `network` between its `devices`, and its outputs to the first of them.

    `part_of` returns the index of the part, and so of the device, to which the module at a path belongs. With
    `overlaps`, no device waits for the copies that others take from it.
    """

    def __init__(
        self, network: nn.Module, part_of: Callable[[str], int], devices: Sequence[Device], *, overlaps: bool
    ) -> None:
        self._network, self._devices = network, [device.torch_device for device in devices]
        self._parts = {path: part_of(path) for path in outer_modules(network)}
        self._copies = _Copies({device.torch_device: device for device in devices} if overlaps else {})
        self._between: _BetweenModules | None = None  # while the network runs and a tensor has left the first device
        self._active = False  # whether that is in effect: not within modules
        self._running = 0

    def hook(self, undo: Callable[..., object], *, returns: bool) -> None:
        """Register hooks on the modules; `undo` receives how to remove them.

        If it `returns`, all modules after the last block are on the first device.
        """
        blocks = find_blocks(self._network)
        order = block_order(blocks, has_skips=has_skips(self._network))
        last = [path for path in order if self._parts.get(path)][-1]
        for path, index in self._parts.items():
            module = self._network.get_submodule(path)
            own = None if path not in blocks and _is_weightless(module) else self._devices[index]
            back = self._devices[0] if returns and path == last else None
            if module._compiled_call_impl is None:
                undo(module.register_forward_pre_hook(self._before(own), with_kwargs=True).remove)
                undo(module.register_forward_hook(self._after(back), always_call=True).remove)
            else:
                wrap(module, functools.partial(self._around, own, back), undo)
        undo(self._network.register_forward_pre_hook(self._begin, prepend=True).remove)
        undo(self._network.register_forward_hook(self._end, always_call=True).remove)

    def _around(
        self, own: torch.device | None, back: torch.device | None, work: Callable[..., Any]
    ) -> Callable[..., Any]:
        before, after = self._before(own), self._after(back)

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = before(None, args, kwargs)
            result = None
            try:
                result = work(*args, **kwargs)
            finally:
                result = after(None, args, result)
            return result

        return run

    def _before(self, own: torch.device | None) -> Callable[..., Any]:
        """Return what to do before a module on the device `own`; None: on that of its first argument."""

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            self._pause()
            device = own or self._first_device(args, kwargs)
            there = self._to(device, args), self._to(device, kwargs)
            if device != self._devices[0] and self._running and self._between is None:
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

    def _first_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        given = (leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return next((device for device in given if device in self._devices), self._devices[0])

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
    """Copies of tensors on other devices, each kept as long as its source, unless that was written to.

    Tensors of the devices in `beside` are copied without those waiting for it.
    """

    def __init__(self, beside: Mapping[torch.device, Device]) -> None:
        self._beside = beside
        self._kept: dict[tuple[int, torch.device], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def on(self, device: torch.device, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of `source` on `device`."""
        if source.is_inference():  # torch does not count writes to it
            return self._made(device, source)
        key = id(source), device
        found = self._kept.get(key)
        if found is not None and found[0]() is source and found[1] == source._version:
            return found[2]
        copy = self._made(device, source)
        kept = self._kept
        self._kept[key] = weakref.ref(source, lambda _: kept.pop(key, None)), source._version, copy
        return copy

    def _made(self, device: torch.device, source: torch.Tensor) -> torch.Tensor:
        own = self._beside.get(source.device)
        if own is None or torch.is_grad_enabled():  # a backward pass would copy beside, too
            return source.to(device, non_blocking=True)
        return own.copy_beside(source, device)

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
        if getattr(func, "__name__", "") == "to" and isinstance(args[0], torch.Tensor):  # as Wan's code does
            there = _device_named((*args[1:], *kwargs.values()))
            if there in self._devices and args[0].device in self._devices - {there}:
                args = self._copies.on(there, args[0]), *args[1:]
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


def _device_named(values: Iterable[Any]) -> torch.device | None:
    """Return the device that arguments of `Tensor.to` name, if any."""
    for value in values:
        if isinstance(value, torch.Tensor | torch.device | str):
            return value.device if isinstance(value, torch.Tensor) else torch.device(value)
    return None


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


def _is_weightless(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None
