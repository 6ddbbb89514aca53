"""Host offload of activations that one part of a network makes for a later one, while other parts run.

A U-Net's down blocks make feature maps for its up blocks, and other networks have similar connections. No names are
needed: what a part returns is replaced by proxy tensors. When the next part begins, every live activation that is not
among its inputs is copied to host memory while that part runs. It is copied back when a part or any operation takes it,
and from the second call on prefetched before that.
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
from tightfit.devices.device import Device
from tightfit.devices.memory import is_shared
from tightfit.devices.pinned_pool import ActivationHostPool, HostTape, HostTransfer, bytes_of, is_dense
from tightfit.measure.modules import find_blocks
from tightfit.measure.recorder import Recorder

__all__ = ["offload_waiting_activations"]

LEAST = 8192  # bytes; smaller tensors are not offloaded
Journey = tuple[int, int]  # number of the activation, number of its round trip to the host
_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)


def offload_waiting_activations(module: Any, device: Device, recorder: Recorder, undo: ExitStack) -> None:
    """Offload what the parts of the network `module` make for later parts to host memory until it is needed.

    A network that is compiled as a whole has no parts to stop between: nothing is offloaded.
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
    """Yield the repeated blocks of `network`, and the modules beside them."""
    for child in network.children():
        if id(child) not in blocks and any(id(inner) in blocks for inner in child.modules()):
            yield from _parts(child, blocks)
        else:
            yield child


def _watch(part: nn.Module, enter: Callable[..., tuple[Any, Any]], leave: Callable[..., Any], undo: ExitStack) -> None:
    """Pass the inputs of each call of `part` through `enter` and its output through `leave`; use what they return."""
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
    """Locations of one network's activations between its parts.

    Activations are numbered in the order in which they are made, which is the same in each call. A transfer to the host
    is not repeated in later calls if the activation was not needed after it. Activations are prefetched in the order in
    which the previous call needed them.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self.device, self.recorder = device, recorder
        self.host_pool = ActivationHostPool(device)
        self._leaving: list[HostTape] = []  # host memory of activations that are sent while a part runs
        self._activations: weakref.WeakSet[_OffloadedActivation] = weakref.WeakSet()
        self._is_open = False  # whether the network is running
        self._begun = False  # whether a block has begun
        self._network_inputs: set[int] = set()  # ids of the network's inputs, which belong to its caller
        self._count = 0  # activations in this call
        self._unused_transfers: set[Journey] = set()
        self.went: set[Journey] = set()
        self.came: dict[Journey, int] = {}  # transfers back in this call → turn; tensors needed together share one
        self.turn = 0
        self._turns: dict[Journey, int] = {}  # `came` of the previous call

    def open(self, _network: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_open:  # the previous call was interrupted
            self._rest()
        self._is_open, self._begun, self._count = True, False, 0
        self._network_inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        self.went.clear()
        self.came.clear()
        self.turn = 0

    def close(self, _network: nn.Module, _args: Any, output: Any) -> Any:
        """Finish a call; return the network's output as ordinary tensors."""
        self._unused_transfers |= self.went - self.came.keys()
        present = self.present(output)
        self._turns = dict(self.came)
        self._rest()
        return present

    def _rest(self) -> None:
        self._leaving.clear()
        self.host_pool.settle()
        self._is_open = False

    def enter(self, args: Any, kwargs: Any, *, is_block: bool, is_small: bool) -> tuple[Any, Any]:
        """Begin a part: bring its inputs to the device, and send the other live activations to host memory.

        Nothing is sent for a single layer beside the blocks, or before the first block.
        """
        self._begun |= is_block
        given = {id(leaf.activation) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _ActivationProxy)}
        if self._begun and not is_small:
            while self._leaving:
                self._leaving.pop().sent()
            for activation in list(self._activations):
                if (
                    id(activation) not in given
                    and activation.journey not in self._unused_transfers
                    and (tape := activation.go())
                ):
                    self._leaving.append(tape)
        present: tuple[Any, Any] = self.present((args, kwargs))
        return present

    def present(self, values: Any) -> Any:
        """Return `values` with activations in place of proxies; then prefetch what the previous call needed next."""
        came = len(self.came)
        present = tree_map_only(_ActivationProxy, lambda stand_in: stand_in.activation.present(), values)
        if len(self.came) > came:
            self.turn += 1
            following = self._turns.get(next(reversed(self.came)), -2) + 1
            for activation in list(self._activations):
                if self._turns.get(activation.journey) == following:
                    activation.set_out()
        return present

    def leave(self, output: Any) -> Any:
        """Return `output` with proxies in place of its tensors."""
        return tree_map_only(torch.Tensor, self._stand_in, output) if self._is_open else output

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_offloadable(tensor) or id(tensor) in self._network_inputs:
            return tensor
        activation = next((activation for activation in self._activations if activation.tensor is tensor), None)
        if activation is None:
            self._count += 1
            activation = _OffloadedActivation(tensor, self._count, self)
            self._activations.add(activation)
        return _ActivationProxy(activation)

    def _is_offloadable(self, tensor: torch.Tensor) -> bool:
        """Whether it is a plain tensor on the device that is large enough to offload."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        return plain and tensor.nbytes >= LEAST and tensor.device == self.device.torch_device


class _OffloadedActivation:
    """One activation: on the device, or in host memory."""

    def __init__(self, tensor: torch.Tensor, number: int, offloader: _ActivationOffloader) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.offloader, self.journey = offloader, (number, 1)
        self._tape: HostTape | None = None  # its host memory, if it is not on the device
        self._coming: tuple[torch.Tensor, HostTransfer] | None = None
        self._form, self._dtype = (tensor.shape, tensor.stride()), tensor.dtype

    def go(self) -> HostTape | None:
        """Start copying it to host memory and return the tape; None if it is there already or shares its memory."""
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
        """Start copying it back to the device, unless it is there or the copy has started."""
        if self.tensor is not None or self._coming is not None:
            return
        assert self._tape is not None  # it is in host memory if it is not on the device
        tensor = torch.empty_strided(*self._form, dtype=self._dtype, device=self.offloader.host_pool.place)
        self.offloader.recorder.moved(bytes_in=tensor.nbytes)
        with self.offloader.recorder.uncounted():
            self._coming = tensor, self._tape.read(0, bytes_of(tensor))

    def present(self) -> torch.Tensor:
        """Return the activation on the device."""
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
    """Proxy of an offloaded activation: same shape, strides, dtype and device. Operations on it return proxies too."""

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
            leaf.activation.offloader for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _ActivationProxy)
        )
        args, kwargs = offloader.present((args, kwargs or {}))
        return offloader.leave(func(*args, **kwargs))
