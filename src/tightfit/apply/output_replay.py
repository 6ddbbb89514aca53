"""A call that ran out of memory is made again from its beginning, and what was done by then is not done twice.

Pipelines are loops in Python that nobody can enter half way. But what takes time in them are their networks; so what
those gave back is kept in host memory (on a CPU, whose memory is what ran out, in a file), and given back once more
where they are asked for it the second time. The numbers are the same: random generators are set to where they were,
and a pipeline does the same with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.apply.activations.strips.noise import usual_generators
from tightfit.apply.weights.call_order import Pass
from tightfit.apply.weights.disk_store import FileTensor, SpillFile, read_stored
from tightfit.devices.activation_pool import PAGE, bytes_of, is_dense
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.devices.pinned_pool import PinnedPool
from tightfit.errors import RunError
from tightfit.schema.plan import ComponentRun

__all__ = ["OutputReplayCache", "RngState", "without_frames"]

MOST_BYTES = 2**30  # of host memory, or of the file: what would be more is done again
ALIGNMENT = 512  # bytes, of what lies in a page
_PLAIN = (bool, int, float, str, type(None))


class _Copy(NamedTuple):
    """A tensor of the device in host memory, for what the device is given from then on."""

    room: torch.Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Result(NamedTuple):
    layers: list[Any]  # copies, tensors that are in host memory anyway, where they are in a file, plain values
    form: TreeSpec


class OutputReplayCache:
    """What networks gave back in one call, in their order."""

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.copy_stream()
        self._rooms = _HostBuffers(device)
        self._results: list[_Result | None] = []  # None: it has to be done again
        self._bytes = 0  # of host memory that they take
        self._given = 0  # of them, how many were given back since the call began again
        self.active = False  # whether a call is being made
        self._file: SpillFile | None = None
        self._last: Pass | None = None  # what the call ends with, as far as that is known
        self._ahead = 0  # how many passes of that kind are still to come
        self._order: Sequence[ComponentRun] = ()

    @property
    def count(self) -> int:
        """How many pieces of work need not be done again."""
        return sum(result is not None for result in self._results)

    def forget(self, order: Sequence[ComponentRun] = ()) -> None:
        """Another call begins, which will probably work through `order`."""
        self._results.clear()
        self._rooms.forget()
        self._given = self._bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        self._order = order
        self._expect()

    def _expect(self) -> None:
        """The call is at its beginning."""
        passes = [((each.component, each.method), each.runs) for each in self._order]
        self._last = passes[-1][0] if passes else None
        self._ahead = sum(runs for what, runs in passes if what == self._last)

    def close(self) -> None:
        """Nothing is kept any more, and no host memory for later calls either."""
        self.forget()
        self._rooms.close()

    def begin_again(self) -> None:
        self._given = 0
        self._expect()
        if self._file is not None:
            self._file.finish()

    def once(self, work: Callable[[], Any], what: Pass | None = None) -> Any:
        """What `work()`, the pass `what`, gives, or gave when it was done before in this call."""
        if not self.active:
            return work()
        last = self._is_last(what)
        if self._given < len(self._results):
            result = self._results[self._given]
            self._given += 1
            return work() if result is None else self._back(result)
        value = work()
        self._results.append(None if last else self._kept(value))  # after the last pass little is left to run out
        self._given += 1
        return value

    def _is_last(self, what: Pass | None) -> bool:
        """Whether `what`, which begins, is the last pass of the call, as far as that is known."""
        if what is None or what != self._last:
            return False
        self._ahead -= 1
        return self._ahead == 0

    def _kept(self, value: Any) -> _Result | None:
        """A copy of `value`, on its way; None of what nobody can copy, or while there is no room."""
        layers, form = tree_flatten(value)
        size = sum(layer.nbytes for layer in layers if isinstance(layer, torch.Tensor))
        if not all(isinstance(layer, torch.Tensor) or type(layer) in _PLAIN for layer in layers):
            return None
        if self._bytes + size > MOST_BYTES:
            return None
        self._bytes += size
        try:
            return _Result([self._copied(layer) for layer in layers], form)
        except (torch.OutOfMemoryError, RunError, OSError):  # the device is full, or the disk; or there is none
            return None

    def _copied(self, layer: Any) -> Any:
        if not isinstance(layer, torch.Tensor):
            return layer
        if not self._device.separate:
            self._file = self._file or SpillFile()
            return self._file.write(layer if is_dense(layer) else layer.contiguous())
        if layer.device != self._device.torch_device:
            return layer.detach().clone(memory_format=torch.contiguous_format)
        sent = layer.detach() if is_dense(layer) else layer.detach().contiguous()
        room = self._rooms.take(sent.nbytes)
        handle = self._stream.send(room, bytes_of(sent), self._stream.mark())
        handle.wait_on_device()  # its caller may write into it, and the device has no memory for a second one
        return _Copy(room, sent.shape, sent.stride(), sent.dtype)

    def _back(self, result: _Result) -> Any:
        return tree_unflatten([self._there(layer) for layer in result.layers], result.form)

    def _there(self, layer: Any) -> Any:
        if isinstance(layer, _Copy):
            return self._device.to_device(layer.room.view(layer.dtype).as_strided(layer.shape, layer.strides))
        if isinstance(layer, FileTensor):
            with DiskReader() as reader:
                return read_stored(layer, reader)
        return layer.clone() if isinstance(layer, torch.Tensor) else layer


class _HostBuffers:
    """Host memory for what is kept, page-locked: to any other memory the device's copies make the host wait.

    Small results lie together in pages, which are there for the next call too: locking takes longer than copying.
    """

    def __init__(self, device: Device) -> None:
        self._pages = PinnedPool(device)
        self._taken: list[torch.Tensor] = []  # the last is not full
        self._left = 0  # bytes at its end

    def take(self, size: int) -> torch.Tensor:
        """`size` bytes, uint8 of shape (size,), until `forget`."""
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if room > self._left or not self._taken:
            whole = max(-(-room // PAGE), 1) * PAGE
            self._taken.append(self._pages.take(whole))
            self._left = whole
        page = self._taken[-1]
        start = page.nbytes - self._left
        self._left -= room
        return page[start : start + size]

    def forget(self) -> None:
        """Nobody needs what was taken: the next call uses it again."""
        self._taken.clear()
        self._left = 0

    def close(self) -> None:
        self.forget()
        self._pages.close()


class RngState:
    """Where random generators are when a call begins: those it was given, and the usual ones."""

    def __init__(self, kwargs: Mapping[str, Any], device: Device) -> None:
        given = kwargs.get("generator")
        several = [*(given if isinstance(given, list | tuple) else [given]), *(usual_generators(device) or ())]
        self._states = [(each, each.get_state()) for each in several if isinstance(each, torch.Generator)]

    def rewind(self) -> None:
        """All are where they were."""
        for generator, state in self._states:
            generator.set_state(state)


def without_frames(error: BaseException, handled: BaseException | None) -> BaseException:
    """`error` without the frames in which it arose, and what it arose from since something else was `handled`.

    They hold what was computed so far.
    """
    link: BaseException | None = error
    while link is not None and link is not handled:
        link.__traceback__, link = None, link.__context__
    return error
