"""Retry of a call that ran out of memory: it starts over, and replays component outputs computed before.

A pipeline is a Python loop that cannot be entered half way, but most of its time is spent in its networks. So their
outputs are kept in host memory (on a CPU, whose memory is what ran out, in a file), and returned when the retry asks
for them. The results are the same: random generators are reset to their states at the start of the call, and with
the same inputs a pipeline does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.apply.activations.strips.program_inputs import usual_generators
from tightfit.apply.weights.call_order import CallKey
from tightfit.apply.weights.disk_store import SpillFile, read_stored
from tightfit.apply.weights.weight_store import FileTensor
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.devices.pinned_pool import PAGE, PinnedPool, bytes_of, is_dense
from tightfit.errors import RunError
from tightfit.schema.plan import ComponentRun

__all__ = ["OutputReplayCache", "RngState", "without_frames"]

MOST_BYTES = 2**30  # of host memory or of the file, for kept outputs; others are recomputed
ALIGNMENT = 512  # bytes, of outputs in a page
_PLAIN = (bool, int, float, str, type(None))


class _Copy(NamedTuple):
    """A copy in host memory of a device tensor; the device's later work is ordered after it."""

    buffer: torch.Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _ReplayedResult(NamedTuple):
    leaves: list[Any]  # _Copy of a device tensor, copy of a host tensor, FileTensor, or plain value
    form: TreeSpec


class OutputReplayCache:
    """Outputs of the component calls in one pipeline call, in order."""

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.copy_stream()
        self._rooms = _HostBuffers(device)
        self._results: list[_ReplayedResult | None] = []  # None: to be recomputed
        self._bytes = 0  # of kept outputs
        self._given = 0  # component calls finished or replayed since the call last started
        self.active = False  # whether a call is running
        self._file: SpillFile | None = None
        self._last: CallKey | None = None  # the last component call expected, if known
        self._ahead = 0  # remaining calls of that kind
        self._order: Sequence[ComponentRun] = ()

    @property
    def count(self) -> int:
        """Number of component calls that need not be recomputed."""
        return sum(result is not None for result in self._results)

    def forget(self, order: Sequence[ComponentRun] = ()) -> None:
        """Discard all outputs before another call, which is expected to run `order`."""
        self._results.clear()
        self._rooms.forget()
        self._given = self._bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        self._order = order
        self._expect()

    def _expect(self) -> None:
        """Set the component call that is expected last, at the start of a call."""
        passes = [((each.component, each.method), each.runs) for each in self._order]
        self._last = passes[-1][0] if passes else None
        self._ahead = sum(runs for what, runs in passes if what == self._last)

    def close(self) -> None:
        """Discard all outputs, and the host memory kept for later calls."""
        self.forget()
        self._rooms.close()

    def begin_again(self) -> None:
        self._given = 0
        self._expect()
        if self._file is not None:
            self._file.finish()

    def once(self, work: Callable[[], Any], what: CallKey | None = None, *, keeps: bool = True) -> Any:
        """Return `work()`, the component call `what`, or its output from before the retry, unless it `keeps` none."""
        if not self.active:
            return work()
        last = self._is_last(what)
        if self._given < len(self._results):
            result = self._results[self._given]
            self._given += 1
            return work() if result is None else self._back(result)
        value = work()
        # after the last one, little can run out of memory
        self._results.append(None if last or not keeps else self._kept(value))
        self._given += 1
        return value

    def _is_last(self, what: CallKey | None) -> bool:
        """Whether `what`, which begins, is the last component call, as far as known; counts it."""
        if what is None or what != self._last:
            return False
        self._ahead -= 1
        return self._ahead == 0

    def _kept(self, value: Any) -> _ReplayedResult | None:
        """Start a copy of `value`; None where it is of other types than can be copied, or memory is lacking."""
        leaves, form = tree_flatten(value)
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        if not all(isinstance(leaf, torch.Tensor) or type(leaf) in _PLAIN for leaf in leaves):
            return None
        if self._bytes + size > MOST_BYTES:
            return None
        self._bytes += size
        try:
            return _ReplayedResult([self._copied(leaf) for leaf in leaves], form)
        except (torch.OutOfMemoryError, RunError, OSError):  # memory or disk is full, or there is no disk
            return None

    def _copied(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not self._device.separate:
            self._file = self._file or SpillFile()
            return self._file.write(leaf if is_dense(leaf) else leaf.contiguous())
        if leaf.device != self._device.torch_device:
            return leaf.detach().clone(memory_format=torch.contiguous_format)
        sent = leaf.detach() if is_dense(leaf) else leaf.detach().contiguous()
        room = self._rooms.take(sent.nbytes)
        handle = self._stream.send(room, bytes_of(sent), self._stream.mark())
        handle.wait_on_device()  # the caller may write into it, and the device has no memory for a copy
        return _Copy(room, sent.shape, sent.stride(), sent.dtype)

    def _back(self, result: _ReplayedResult) -> Any:
        return tree_unflatten([self._there(leaf) for leaf in result.leaves], result.form)

    def _there(self, leaf: Any) -> Any:
        if isinstance(leaf, _Copy):
            return self._device.to_device(leaf.buffer.view(leaf.dtype).as_strided(leaf.shape, leaf.strides))
        if isinstance(leaf, FileTensor):
            with DiskReader() as reader:
                return read_stored(leaf, reader)
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class _HostBuffers:
    """Host memory for kept outputs, page-locked: device copies to other host memory block the host.

    Small outputs share pages. Pages are kept for the next call: locking them takes longer than copying.
    """

    def __init__(self, device: Device) -> None:
        self._pages = PinnedPool(device)
        self._taken: list[torch.Tensor] = []  # pages; the last may have free bytes
        self._left = 0  # free bytes at its end

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, uint8 of shape (size,), valid until `forget`."""
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
        """Release all bytes taken: the next call reuses them."""
        self._taken.clear()
        self._left = 0

    def close(self) -> None:
        self.forget()
        self._pages.close()


class RngState:
    """States of random generators at the start of a call: of those it was given, and of the default ones."""

    def __init__(self, kwargs: Mapping[str, Any], device: Device) -> None:
        given = kwargs.get("generator")
        several = [*(given if isinstance(given, list | tuple) else [given]), *(usual_generators(device) or ())]
        self._states = [(each, each.get_state()) for each in several if isinstance(each, torch.Generator)]

    def rewind(self) -> None:
        """Set all generators back to these states."""
        for generator, state in self._states:
            generator.set_state(state)


def without_frames(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return `error` without the traceback frames of itself and of its contexts, up to the error being `handled`.

    The frames hold tensors computed so far.
    """
    link: BaseException | None = error
    while link is not None and link is not handled:
        link.__traceback__, link = None, link.__context__
    return error
