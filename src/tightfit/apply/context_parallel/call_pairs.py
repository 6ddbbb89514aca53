"""Two calls of a denoiser in a row, of which each of two groups of ranks computes one.

The first call returns tensors without values (`DeferredOutput`), which are exchanged at the second call, before it
returns. If anything reads them earlier, they are exchanged then: the first group sends them. All ranks run the same
code, so this happens on all of them at the same point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.apply.activations.outputs import combine, take_apart
from tightfit.apply.context_parallel.deferred_tensor import DeferredOutput
from tightfit.apply.context_parallel.guidance_ranks import GuidanceRanks

__all__ = ["CallPairs", "OutputForm", "UnknownOutput"]

EARLY, BOTH = 1.0, 2.0  # what is exchanged: the first output alone, or both


class UnknownOutput(Exception):
    """An output that groups of ranks cannot send each other; the message says why."""


@dataclass(frozen=True)
class OutputForm:
    """Shapes, strides and dtypes of an output's tensors, on "meta"; their device; and how to make an output of some."""

    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    rebuild: Callable[[Sequence[torch.Tensor]], Any]

    @classmethod
    def of(cls, output: Any) -> OutputForm:
        """Return the form of `output`. Raises UnknownOutput."""
        tensors = _taken_apart(output)
        if len(devices := {tensor.device for tensor in tensors}) != 1:
            raise UnknownOutput(f"its output's tensors are on {len(devices)} devices")
        like, rebuild = take_apart(combine([output], lambda several: _empty(several[0], torch.device("meta"))))
        return cls(tuple(like), devices.pop(), rebuild)

    def taken(self, output: Any) -> list[torch.Tensor]:
        """Return the tensors of `output`, laid out as in this form. Raises UnknownOutput."""
        tensors = _taken_apart(output)
        found, usual = ([(tuple(each.shape), each.dtype) for each in some] for some in (tensors, self.tensors))
        if found != usual:
            raise UnknownOutput(f"its output has {found}, where an earlier one had {usual}")
        return [tensor if tensor.stride() == like.stride() else _empty(like, tensor.device).copy_(tensor)
                for tensor, like in zip(tensors, self.tensors, strict=True)]  # fmt: skip


@dataclass(frozen=True)
class _WaitingCall:
    """A first call whose output was not exchanged yet."""

    name: str
    form: OutputForm
    inputs: torch.Tensor  # a digest
    own: list[torch.Tensor] | None  # its output, in the first group
    output: DeferredOutput
    read: Callable[[], None]  # is called if it is read early


class CallPairs:
    """The calls of denoisers in a pipeline's call; at most one of them waits for a second one."""

    def __init__(self, guidance: GuidanceRanks) -> None:
        self.guidance = guidance
        self._depth = 0  # pipeline calls in progress, within one another
        self._first: _WaitingCall | None = None
        self._ends: dict[str, Callable[[], None]] = {}

    @property
    def active(self) -> bool:
        """Whether a pipeline's call is in progress."""
        return self._depth > 0

    @property
    def waiting(self) -> str | None:
        """The component whose call waits for a second one."""
        return None if self._first is None else self._first.name

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Run a pipeline's call within this; at its end all outputs have their values."""
        self._depth += 1
        try:
            yield
            if self._depth == 1:
                self.complete()
                for end in self._ends.values():
                    end()
        finally:
            self._depth -= 1
            if not self._depth:
                self._first = None
                self._ends.clear()

    def at_end(self, name: str, end: Callable[[], None]) -> None:
        """Call `end` at the end of the pipeline's call, for the component `name`."""
        self._ends.setdefault(name, end)

    def begin(
        self, name: str, form: OutputForm, inputs: Sequence[torch.Tensor], compute: Callable[[], Any],
        read: Callable[[], None],
    ) -> Any:  # fmt: skip
        """Return the output of the first call, deferred; the first group computes it."""
        digest = self.guidance.branches.digest(inputs)
        own = form.taken(compute()) if self.guidance.number == 0 else None
        output = DeferredOutput(form.tensors, form.device, self.complete)
        self._first = _WaitingCall(name, form, digest, own, output, read)
        return form.rebuild(list(output.tensors))

    def complete(self) -> None:
        """Give the other group the output of a first call that waits for a second one; do nothing if none waits."""
        first, self._first = self._first, None
        if first is None:
            return
        tensors = first.own or []
        found = self._exchange(first, None, EARLY, tensors, () if first.own is not None else first.form.tensors)
        first.output.fill(tensors or found)
        first.read()

    def end(self, form: OutputForm, inputs: Sequence[torch.Tensor], compute: Callable[[], Any]) -> Any:
        """Return the output of the second call, which the second group computes; the first call's is filled in."""
        digest, first = self.guidance.branches.digest(inputs), self._first
        assert first is not None
        own = form.taken(compute()) if self.guidance.number == 1 else first.own or []
        if self._first is not first:  # it was read while the second one was computed
            raise UnknownOutput(f"its call read the output of the call before, of {first.name}")
        self._first = None
        wanted = first.form if self.guidance.number == 1 else form
        found = self._exchange(first, digest, BOTH, own, wanted.tensors)
        first.output.fill(found if self.guidance.number == 1 else own)
        return form.rebuild(own if self.guidance.number == 1 else found)

    def _exchange(
        self, first: _WaitingCall, second: torch.Tensor | None, what: float, sent: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Send some tensors to the other group, and return those that came from it, like `wanted`."""
        branches, other = self.guidance.branches, 1 - self.guidance.number
        inputs = [torch.full_like(first.inputs, what), first.inputs, second if second is not None else first.inputs]
        with branches.call():
            branches.check_same(first.name, inputs, "was called with other values, or read an output earlier,")
            coming = [torch.empty(like.shape, dtype=like.dtype, device=first.form.device) for like in wanted]
            branches.exchange([(other, each.contiguous()) for each in sent], [(other, each) for each in coming])
        pairs = zip(coming, wanted, strict=True)
        return [each if each.stride() == like.stride() else _empty(like, each.device).copy_(each)
                for each, like in pairs]  # fmt: skip


def _taken_apart(output: Any) -> list[torch.Tensor]:
    try:
        return take_apart(output)[0]
    except TypeError as error:
        raise UnknownOutput(f"its output has a part of an unknown kind: a {type(output).__name__}") from error


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
