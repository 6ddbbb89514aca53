"""Device memory for one component's weights: places for what stays, and the ring for what passes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from tightfit.apply.weights.parcels import Parcel
from tightfit.apply.weights.ring import Lease, Ring
from tightfit.devices.seam import Device
from tightfit.measure.recorder import Recorder

__all__ = ["Rooms"]

CHUNK = 128 * 2**20  # bytes that are taken, and given up, together


class Rooms:
    """Taken for a while, in few large pieces, and counted."""

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device, self._recorder = device, recorder
        self._forget()

    def _forget(self) -> None:
        self._chunks: list[tuple[torch.Tensor, list[Parcel]]] = []
        self._places: dict[Parcel, torch.Tensor] = {}
        self._ring, self._ring_room = Ring(0), torch.empty(0, dtype=torch.uint8)
        self._counted = 0

    def take(self, stays: Iterable[Parcel], ring: int) -> list[Parcel]:
        """Takes a place for each in `stays`, and the ring; returns those for which there was no memory."""
        left: list[Parcel] = []
        for chunk in _chunks(stays):
            room = None if left else self._room_or_none(sum(_aligned(parcel) for parcel in chunk))
            if room is None:
                left += chunk
                continue
            self._chunks.append((room, chunk))
            offset = 0
            for parcel in chunk:
                self._places[parcel] = room[offset : offset + parcel.size]
                offset += _aligned(parcel)
        room = self._room_or_none(ring)
        while room is None and self._chunks:
            left += self.give_up(lambda _: True)
            room = self._room_or_none(ring)
        self._ring_room, self._ring = (self.extra(ring), Ring(ring)) if room is None else (room, Ring(ring))
        return left

    def extra(self, size: int) -> torch.Tensor:
        """`size` bytes that are nobody's, for a single use."""
        with self._recorder.uncounted():
            return self._device.room(size)

    def _room_or_none(self, size: int) -> torch.Tensor | None:
        try:
            room = self.extra(size)
        except torch.OutOfMemoryError:
            return None
        self._count(size)
        return room

    def _count(self, size: int) -> None:
        self._counted += size
        self._recorder.hold(self, self._counted)

    def place(self, parcel: Parcel) -> torch.Tensor:
        """Where `parcel`, which stays, has its place."""
        return self._places[parcel]

    def lease(self, parcel: Parcel) -> tuple[Lease, torch.Tensor] | None:
        """A place in the ring; None while there is none."""
        lease = self._ring.take(parcel.size)
        return None if lease is None else (lease, self._ring_room[lease.offset : lease.offset + parcel.size])

    def give_back(self, lease: Lease, mark: object) -> None:
        """The place in the ring is free for what waits for `mark`."""
        self._ring.give_back(lease, mark)

    def give_up(self, idle: Callable[[Parcel], bool]) -> list[Parcel]:
        """Gives up the latest piece whose parcels are all `idle`; returns these: they have no places any more."""
        for index, (room, parcels) in reversed(list(enumerate(self._chunks))):
            if all(map(idle, parcels)):
                del self._chunks[index]
                for parcel in parcels:
                    del self._places[parcel]
                self._count(-room.nbytes)
                return parcels
        return []

    def clear(self) -> None:
        """Everything is given back."""
        self._forget()
        self._recorder.hold(self, 0)


def _chunks(stays: Iterable[Parcel]) -> Iterator[list[Parcel]]:
    chunk: list[Parcel] = []
    for parcel in stays:
        if chunk and sum(_aligned(other) for other in chunk) + parcel.size > CHUNK:
            yield chunk
            chunk = []
        chunk.append(parcel)
    if chunk:
        yield chunk


def _aligned(parcel: Parcel) -> int:
    return -(-parcel.size // parcel.home.alignment) * parcel.home.alignment
