"""Activations that wait: what one part of a network made for a later one is in host memory while others work.

A U-Net's down blocks leave their maps to its up blocks, and other networks do the like in ways of their own. So
nobody asks for names here: whatever a part returns is handed on as a tensor that stands for it. When the next part
begins, what does not go into it and is still there is waiting, and moves to host memory while that part works; it
comes back when a part is given it, or any operation takes it, and from the second pass on begins to come before that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.apply.module_hooks import wrap
from tightfit.devices.activation_pool import ActivationHostPool, HostTape, HostTransfer, bytes_of, is_dense
from tightfit.devices.device import Device
from tightfit.devices.memory import is_shared
from tightfit.measure.modules import find_blocks
from tightfit.measure.recorder import Recorder

__all__ = ["offload_waiting_activations"]

LEAST = 8192  # bytes that are worth a journey
Journey = tuple[int, int]  # whose, and which of its journeys
_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)


def offload_waiting_activations(module: Any, device: Device, recorder: Recorder, undo: ExitStack) -> None:
    """Sends what the parts of the network `module` leave for later ones to host memory until it is needed.

    A network that is compiled as a whole has no parts to stop between: there nothing moves.
    """
    if module._compiled_call_impl is not None:
        return
    offloader = _ActivationOffloader(device, recorder)
    undo.callback(offloader.host_pool.close)
    undo.callback(module.register_forward_pre_hook(offloader.open, prepend=True, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(offloader.close, always_call=True).remove)
    blocks = set(map(id, find_blocks(module).values()))
    for part in _parts(module, blocks):
        is_block = id(part) in blocks
        is_small = not is_block and not any(True for _ in part.children())
        _watch(part, functools.partial(offloader.enter, is_block=is_block, is_small=is_small), offloader.leave, undo)


def _parts(network: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """The repeated blocks of `network`, and what is beside them."""
    for child in network.children():
        if id(child) not in blocks and any(id(inner) in blocks for inner in child.modules()):
            yield from _parts(child, blocks)
        else:
            yield child


def _watch(part: nn.Module, enter: Callable[..., tuple[Any, Any]], leave: Callable[..., Any], undo: ExitStack) -> None:
    """`enter` looks at what each pass of `part` is given, `leave` at what it makes; they return what is to be taken."""
    if part._compiled_call_impl is None:
        undo.callback(part.register_forward_pre_hook(lambda _, *given: enter(*given), with_kwargs=True).remove)
        undo.callback(part.register_forward_hook(lambda _, __, made: leave(made)).remove)
        return

    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = enter(args, kwargs)
            return leave(work(*args, **kwargs))

        return run

    wrap(part, around, undo.callback)


class _ActivationOffloader:
    """Where one network's activations are between its parts.

    They are numbered in the order in which they are made, the same in each pass: a journey after which nobody wanted
    what had gone is not made again, and what came back after something else will do so again.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self.device, self.recorder = device, recorder
        self.host_pool = ActivationHostPool(device)
        self._leaving: list[HostTape] = []  # where guests are going while a part works
        self._guests: weakref.WeakSet[_OffloadedActivation] = weakref.WeakSet()
        self._is_open = False  # whether the network works
        self._begun = False  # whether a block has
        self._strangers: set[int] = set()  # by id, what the network was given: that is its caller's
        self._count = 0  # of guests in this pass
        self._vain: set[Journey] = set()
        self.went: set[Journey] = set()
        self.came: dict[Journey, int] = {}  # and in which turn: what is given together comes in one
        self.turn = 0
        self._turns: dict[Journey, int] = {}  # in the pass before

    def open(self, _network: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_open:  # the pass before was interrupted
            self._rest()
        self._is_open, self._begun, self._count = True, False, 0
        self._strangers = {id(layer) for layer in tree_leaves((args, kwargs))}
        self.went.clear()
        self.came.clear()
        self.turn = 0

    def close(self, _network: nn.Module, _args: Any, output: Any) -> Any:
        """The network's own output is an ordinary one."""
        self._vain |= self.went - self.came.keys()
        present = self.present(output)
        self._turns = dict(self.came)
        self._rest()
        return present

    def _rest(self) -> None:
        self._leaving.clear()
        self.host_pool.settle()
        self._is_open = False

    def enter(self, args: Any, kwargs: Any, *, is_block: bool, is_small: bool) -> tuple[Any, Any]:
        """A part begins: what it is given is there, and what it is not given goes to host memory.

        Nothing goes for a single layer beside the blocks, or before the first of these.
        """
        self._begun |= is_block
        given = {id(layer.activation) for layer in tree_leaves((args, kwargs)) if isinstance(layer, _ActivationProxy)}
        if self._begun and not is_small:
            while self._leaving:
                self._leaving.pop().sent()
            for activation in list(self._guests):
                if id(activation) not in given and activation.journey not in self._vain and (tape := activation.go()):
                    self._leaving.append(tape)
        present: tuple[Any, Any] = self.present((args, kwargs))
        return present

    def present(self, values: Any) -> Any:
        """`values` with guests in place of what stands for them; then those that came next the last time set out."""
        came = len(self.came)
        present = tree_map_only(_ActivationProxy, lambda stand_in: stand_in.activation.present(), values)
        if len(self.came) > came:
            self.turn += 1
            following = self._turns.get(next(reversed(self.came)), -2) + 1
            for activation in list(self._guests):
                if self._turns.get(activation.journey) == following:
                    activation.set_out()
        return present

    def leave(self, output: Any) -> Any:
        """What was made is handed on as what stands for it."""
        return tree_map_only(torch.Tensor, self._stand_in, output) if self._is_open else output

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._may_wait(tensor) or id(tensor) in self._strangers:
            return tensor
        activation = next((activation for activation in self._guests if activation.tensor is tensor), None)
        if activation is None:
            self._count += 1
            activation = _OffloadedActivation(tensor, self._count, self)
            self._guests.add(activation)
        return _ActivationProxy(activation)

    def _may_wait(self, tensor: torch.Tensor) -> bool:
        """Whether it is a plain tensor that is worth a journey."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        return plain and tensor.nbytes >= LEAST and tensor.device == self.device.torch_device


class _OffloadedActivation:
    """One activation: on the device, or in host memory."""

    def __init__(self, tensor: torch.Tensor, number: int, offloader: _ActivationOffloader) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.offloader, self.journey = offloader, (number, 1)
        self._tape: HostTape | None = None  # where it is, if it is not here
        self._coming: tuple[torch.Tensor, HostTransfer] | None = None
        self._form, self._dtype = (tensor.shape, tensor.stride()), tensor.dtype

    def go(self) -> HostTape | None:
        """To host memory, unless it is there, or its memory on the device is not its own; where it is going."""
        if self.tensor is None or is_shared(self.tensor):
            return None
        dense = self.tensor if is_dense(self.tensor) else self.tensor.contiguous()
        self._form = dense.shape, dense.stride()
        with self.offloader.recorder.uncounted():
            self._tape = self.offloader.host_pool.tape(dense.nbytes)
            self._tape.write(bytes_of(dense))
        self.offloader.recorder.moved(bytes_out=dense.nbytes)
        self.offloader.went.add(self.journey)
        self.tensor = None
        return self._tape

    def set_out(self) -> None:
        """It begins to come back, unless it is here or has begun."""
        if self.tensor is not None or self._coming is not None:
            return
        assert self._tape is not None  # it is there if it is not here
        tensor = torch.empty_strided(*self._form, dtype=self._dtype, device=self.offloader.host_pool.place)
        self.offloader.recorder.moved(bytes_in=tensor.nbytes)
        with self.offloader.recorder.uncounted():
            self._coming = tensor, self._tape.read(0, bytes_of(tensor))

    def present(self) -> torch.Tensor:
        """The activation itself, on the device."""
        if self.tensor is None:
            self.set_out()
            assert self._coming is not None
            tensor, handle = self._coming
            handle.settle()
            self.tensor, self._coming, self._tape = tensor, None, None
            self.offloader.came[self.journey] = self.offloader.turn
            self.journey = self.journey[0], self.journey[1] + 1
        return self.tensor


class _ActivationProxy(torch.Tensor):
    """Stands for a guest: of the same shape, strides and dtype, on the device. What is made of it is a guest too."""

    activation: _OffloadedActivation

    @staticmethod
    def __new__(cls, activation: _OffloadedActivation) -> _ActivationProxy:
        like = activation.present()
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )

    def __init__(self, activation: _OffloadedActivation) -> None:
        self.activation = activation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ALIASES:
            return cls(args[0].activation)
        offloader = next(
            layer.activation.offloader for layer in tree_leaves((args, kwargs)) if isinstance(layer, _ActivationProxy)
        )
        args, kwargs = offloader.present((args, kwargs or {}))
        return offloader.leave(func(*args, **kwargs))
