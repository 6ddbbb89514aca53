"""A tensor whose values come later: views of it are taken at once, and whatever else reads it gets the values first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.errors import RunError

__all__ = ["DeferredOutput", "DeferredTensor"]

_aten = torch.ops.aten
# operations on one tensor alone that change nothing: they are done when the values are there
_COPIES = {_aten._to_copy.default, _aten.clone.default, _aten.neg.default}
# what looks at a tensor's memory without an operation that torch dispatches
_READS = {
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.untyped_storage),
    *(torch.Tensor.storage, torch.Tensor._typed_storage, torch.Tensor.__array__, torch.Tensor.__dlpack__),
    *(torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__, torch.Tensor.__repr__, torch.Tensor.__format__),
    torch.Tensor.__cuda_array_interface__.__get__,
}


class DeferredOutput:
    """The `tensors` of an output, like `templates` (on "meta"), on `device`; `fill` gives them values later, in place.

    `read` is called where something needs the values before; it has to lead to `fill`.
    """

    def __init__(self, templates: Sequence[torch.Tensor], device: torch.device, read: Callable[[], None]) -> None:
        self._read, self._thread = read, threading.get_ident()
        self._values: Sequence[torch.Tensor] | None = None
        self._unfilled: list[DeferredTensor] = []  # in the order in which they were made
        self.tensors = [self._tensor(like, device, partial(self._value, n)) for n, like in enumerate(templates)]

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Give the tensors, and views of them, these values; where nothing prevents it, they become ordinary ones."""
        self._values = values
        unfilled, self._unfilled = self._unfilled, []
        for tensor in unfilled:
            tensor.find()
        while unfilled:  # views first: torch refers to what they are views of
            unfilled.pop().become_ordinary()

    def read(self) -> None:
        """Have the values filled in now. RunError if that cannot be."""
        if threading.get_ident() != self._thread:
            raise RunError(
                f"{len(self._unfilled)} tensors of a network's output were read in another thread than the pipeline's, "
                "before a step's second guidance call: read them after it, or leave cfg out of parallel"
            )
        if self._values is None:
            self._read()
        if self._values is None:
            raise RunError(f"{len(self._unfilled)} tensors of a network's output have no values: its call failed")

    def derived(self, source: DeferredTensor, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `op`, of views or copies, makes of `source`, as deferred tensors."""
        on_meta = {name: value for name, value in kwargs.items() if name != "device"}
        found, device = op(source.like, *args, **on_meta), kwargs.get("device") or source.device

        def make(number: int) -> torch.Tensor:
            made = op(_ordinary(source), *args, **kwargs)
            return made if isinstance(made, torch.Tensor) else made[number]

        if isinstance(found, torch.Tensor):
            return self._tensor(found, device, partial(make, 0))
        return [self._tensor(like, device, partial(make, n)) for n, like in enumerate(found)]

    def _tensor(self, like: torch.Tensor, device: torch.device, make: Callable[[], torch.Tensor]) -> DeferredTensor:
        made = DeferredTensor(self, like, device, make)
        self._unfilled.append(made)
        return made

    def _value(self, number: int) -> torch.Tensor:
        assert self._values is not None
        return self._values[number]


class DeferredTensor(torch.Tensor):
    """A tensor of `output` like `like`, whose values `make` returns once they are there."""

    like: torch.Tensor
    _output: DeferredOutput
    _make: Callable[[], torch.Tensor]
    _found: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[Self],
        output: DeferredOutput,
        like: torch.Tensor,
        device: torch.device,
        make: Callable[[], torch.Tensor],
    ) -> Self:
        wrapper = torch.Tensor._make_wrapper_subclass
        made: Self = wrapper(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        made.like, made._output, made._make, made._found = like, output, make, None
        return made

    @property
    def found(self) -> torch.Tensor | None:
        """An ordinary tensor with the values; None if they are not there."""
        return self._found

    def read(self) -> None:
        """Have the values filled in now."""
        self._output.read()

    def find(self) -> None:
        """Take the values."""
        self._found = self._make()

    def become_ordinary(self) -> None:
        """Become an ordinary tensor with the values, if nothing in torch refers to this one."""
        assert self._found is not None
        with contextlib.suppress(RuntimeError):
            torch.utils.swap_tensors(self, self._found.detach())  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            args, kwargs = _filled((args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no func
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        source = args[0] if args else None
        alone = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((list(args[1:]), dict(named))))
        if isinstance(source, DeferredTensor) and alone and (func.is_view or func in _COPIES):
            if source._found is None:
                return source._output.derived(source, func, args[1:], named)
        elif torch.Tag.inplace_view in func.tags:
            raise RunError(f"{func} changes the shape of a network's output in place, before its values are there")
        args, named = _filled((args, named))
        return func(*args, **named)


def _filled(values: Any) -> Any:
    return tree_map_only(DeferredTensor, _ordinary, values)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor with the values of `tensor`, which are read now if they are not there."""
    if isinstance(tensor, DeferredTensor) and tensor.found is None:
        tensor.read()
    if not isinstance(tensor, DeferredTensor):  # by now
        return tensor
    assert tensor.found is not None
    return tensor.found
