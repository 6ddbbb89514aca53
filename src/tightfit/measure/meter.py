"""Counts tensor bytes where no allocator does: activations on the CPU and the loopback device."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TensorMeter"]


class _Life(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a counted storage."""

    __slots__ = ("key", "size")
    key: int
    size: int


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, calls `changed` with the bytes of each storage that operations create, and negated for freed ones.

    Storages are counted once, whatever their views; not counted are storages that existed before, those on "meta" (they
    have no memory), and those created while `paused`. Memory that a kernel allocates and frees within one operation is
    not seen. Freed storages are reported with the next operation or `settle()`.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed = changed
        self._live: dict[int, _Life] = {}
        self._dead: list[weakref.ref[torch.UntypedStorage]] = []
        self._paused = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a tensor subclass (stored weights): its own handler runs the plain operations, which are seen one by one
        if any(kind not in _PLAIN for kind in types):  # (`tensor.data` passes torch.Tensor itself)
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self._paused and not _aliases(func):
            self.settle()
            for tensor in _tensors(result):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._live and not _holds(args, key) and not (kwargs and _holds(kwargs.values(), key)):
                    self._count(storage, key)
        return result

    def _count(self, storage: torch.UntypedStorage, key: int) -> None:
        # a builtin as callback: Python swallows exceptions in one, and KeyboardInterrupt occurs in Python code only
        life = _Life(storage, self._dead.append)
        life.key, life.size = key, storage.nbytes()
        self._live[key] = life
        self._changed(life.size)

    def settle(self) -> None:
        """Report the storages freed since the last call."""
        freed = 0
        while self._dead:
            life = self._dead.pop()
            assert isinstance(life, _Life)
            if self._live.get(life.key) is life:
                del self._live[life.key]
                freed += life.size
        if freed:
            self._changed(-freed)

    def forget(self) -> None:
        """Stop following the live storages, without reporting them."""
        self._live.clear()
        self._dead.clear()


@functools.cache
def _aliases(func: torch._ops.OpOverload) -> bool:
    """Whether `func` is a view or writes in place, by its schema: then it creates no storage.

    Composite operations (`contiguous`, `reshape`, `to`) have such a schema too, but may copy. In inference mode they
    are dispatched as a whole; otherwise, as the operations that they consist of.
    """
    together = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return not together and all(value.alias_info is not None for value in func._schema.returns)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory in an operation's result: a tensor, or nested tuples and lists."""
    if type(value) in _PLAIN:
        if value.layout is torch.strided and not value.is_meta:  # type: ignore[attr-defined]
            yield value  # type: ignore[misc]
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _holds(values: Iterable[Any], key: int) -> bool:
    """Whether a tensor in `values` has the storage `key`: then the result is a view of an older storage."""
    for value in values:
        if type(value) in _PLAIN:
            if value.layout is torch.strided and value.untyped_storage()._cdata == key:
                return True
        elif type(value) in (list, tuple) and _holds(value, key):
            return True
    return False
