"""Streams of pretend cards, by the names that `torch.cuda` has for them: offloading of others asks for these."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tightfit.pretend.card import SimulatedCard

__all__ = ["Stream", "giving_to"]

_PLACE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]


class Stream(torch.Stream):
    """What is given to one stream of `card` is done in order, beside what others are given."""

    card: SimulatedCard

    def __new__(cls, card: SimulatedCard, number: int) -> Stream:
        made: Stream = super().__new__(cls, stream_id=number, device_index=card.index, device_type=_PLACE)
        made.card = card
        return made

    def synchronize(self) -> None:
        """The host waits until it has done what it was given."""
        self.card.timeline.record(self.stream_id).wait()

    def query(self) -> bool:
        """Whether it has by now."""
        return self.card.timeline.record(self.stream_id).done()

    def wait_stream(self, other: Any) -> None:
        """What it is given from now on begins after what `other`, of the same computer, was given so far."""
        self.card.timeline.wait(self.stream_id, other.card.timeline.record(other.stream_id))


@contextlib.contextmanager
def giving_to(stream: Stream | None) -> Iterator[None]:
    """What is done inside goes to `stream`; None is the one that it would go to anyway."""
    with contextlib.nullcontext() if stream is None else stream.card.on(stream.stream_id):
        yield
