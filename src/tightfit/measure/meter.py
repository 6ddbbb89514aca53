"""Counting tensor bytes where no allocator does: the CPU's and the loopback card's activations."""

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
    """A storage that is followed until it dies."""

    __slots__ = ("key", "size")
    key: int
    size: int


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, tells `changed` the bytes of every storage that operations make and of every one that died.

    Storages are counted once, whatever views there are; storages that existed before do not count, nor do those on
    "meta" (they have no memory), nor what is made while `paused`. Memory that a kernel takes and returns within one
    operation is not seen. Deaths are told with the next operation or `settle()`.
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
        # a tensor subclass (stored weights): its own handler runs the plain operations, seen one by one
        if any(kind not in _PLAIN for kind in types):  # (`tensor.data` names torch.Tensor itself)
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
        # a builtin as callback: Python swallows what is raised in one, and Ctrl-C is raised in Python code only
        life = _Life(storage, self._dead.append)
        life.key, life.size = key, storage.nbytes()
        self._live[key] = life
        self._changed(life.size)

    def settle(self) -> None:
        """Tells of the storages that died since the last time."""
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
        """Stops following what is still alive, without telling."""
        self._live.clear()
        self._dead.clear()


@functools.cache
def _aliases(func: torch._ops.OpOverload) -> bool:
    """Whether `func` is a view or writes in place, by its schema: then it makes no storage.

    What is put together from others (`contiguous`, `reshape`, `to`) says so too, and may copy all the same. Such are
    seen whole in inference mode; outside of it, what they are put together from.
    """
    together = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return not together and all(value.alias_info is not None for value in func._schema.returns)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors with memory in what an operation returned: a tensor, or tuples and lists of them and other things."""
    if type(value) in _PLAIN:
        if value.layout is torch.strided and not value.is_meta:  # type: ignore[attr-defined]
            yield value  # type: ignore[misc]
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _holds(values: Iterable[Any], key: int) -> bool:
    """Whether a tensor in `values` has the storage `key`: what came out is then a view of something older."""
    for value in values:
        if type(value) in _PLAIN:
            if value.layout is torch.strided and value.untyped_storage()._cdata == key:
                return True
        elif type(value) in (list, tuple) and _holds(value, key):
            return True
    return False
