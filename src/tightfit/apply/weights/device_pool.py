"""Device memory for one component's weights: places for what stays, and the ring for what passes through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder
from tightfit.plan.component_cost import chunks
from tightfit.plan.prefetch import ALIGNMENT, Lease, Ring

__all__ = ["DeviceWeightPool"]

PLACES = 32  # in the ring for which a group's parameters are kept: pass after pass they soon are the same few


class DeviceWeightPool:
    """Taken for a while, in few large pieces, and counted: a place for each that `resident`, and a ring."""

    def __init__(
        self, groups: Sequence[WeightGroup], resident: Collection[str], ring: int, device: Device, recorder: Recorder
    ) -> None:
        self._device, self._recorder = device, recorder
        self._resident = [group for group in groups if group.name in resident]
        self._passing = [group for group in groups if group.name not in resident]
        self._planned = self._ring_size = ring
        self._made_for = _size(self._passing)  # bytes
        self._lent: list[WeightGroup] = []
        self.resident = set(self._resident)  # those that have a place, or will have one
        self._forget()

    def _forget(self) -> None:
        self._expected: list[list[WeightGroup]] = []  # what stays, by the pieces that are not taken yet
        self._chunks: list[tuple[torch.Tensor, list[WeightGroup]]] = []
        self._places: dict[WeightGroup, LoadedGroup] = {}
        self._known: dict[WeightGroup, dict[int, LoadedGroup]] = {}  # by the offset in the ring
        self._ring: Ring | None = None
        self._ring_room = torch.empty(0, dtype=torch.uint8)
        self._counted = 0

    def open(self) -> None:
        """Memory is taken from now on, until `clear`: in a larger ring where somebody made weights larger."""
        self._expected = list(chunks((group for group in self._resident if group in self.resident), _aligned))
        grown = _size(self._passing) > self._made_for
        self._ring_size = self._ring_for(self._passing) if grown else self._planned

    def _ring_for(self, passing: Sequence[WeightGroup]) -> int:
        """The bytes in which about as many of `passing` lie as was planned, the largest of them at least."""
        largest = max(-(-group.size // ALIGNMENT) * ALIGNMENT for group in passing)
        return max(self._planned * _size(passing) // self._made_for, largest)

    def take_some(self, limit: int) -> None:
        """Takes as much of it as keeps within `limit` bytes, all together; the ring first."""
        if self._ring is None and (self._ring_size > limit or not self._take_ring()):
            return
        while self._expected and self._counted + _size(self._expected[0]) <= limit:
            if not self._take_chunk():
                return

    def take(self) -> list[WeightGroup]:
        """Takes all that is missing; returns those of `resident` for which there was no memory."""
        while self._expected and self._take_chunk():
            pass
        left = [group for chunk in self._expected for group in chunk]
        self._expected = []
        self.resident.difference_update(left)
        while self._ring is None and not self._take_ring():
            given_up = self.give_up(lambda _: True)
            if not given_up:
                self._ring_room, self._ring = self.extra(self._ring_size), Ring(self._ring_size)
            left += given_up
        return left

    def _take_chunk(self) -> bool:
        """Takes the next piece for what stays; whether there was memory for it."""
        room = self._room_or_none(_size(self._expected[0]))
        if room is None:
            return False
        chunk = self._expected.pop(0)
        self._chunks.append((room, chunk))
        offset = 0
        for group in chunk:
            self._places[group] = LoadedGroup(group, room[offset : offset + group.size])
            offset += _aligned(group)
        return True

    def _take_ring(self) -> bool:
        room = self._room_or_none(self._ring_size)
        if room is not None:
            self._ring_room, self._ring = room, Ring(self._ring_size)
        return room is not None

    def extra(self, size: int) -> torch.Tensor:
        """`size` bytes that are nobody's, for a single use."""
        with self._recorder.uncounted(), torch.inference_mode(False):  # other calls, in another mode, use it too
            return self._device.allocate(size)

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

    def place(self, group: WeightGroup) -> LoadedGroup | None:
        """Where `group`, which stays, has its place; None while that is not taken."""
        return self._places.get(group)

    def lease(self, group: WeightGroup) -> LoadedGroup | None:
        """A place in the ring; None while there is none."""
        lease = None if self._ring is None else self._ring.take(group.size)
        if lease is None:
            return None
        known = self._known.setdefault(group, {})
        found = known.get(lease.offset)
        if found is None:
            if len(known) >= PLACES:
                known.clear()
            region = self._ring_room[lease.offset : lease.offset + group.size]
            found = known[lease.offset] = LoadedGroup(group, region)
        found.lease = lease
        return found

    def give_back(self, lease: Lease, mark: object) -> None:
        """The place in the ring is free for what waits for `mark`."""
        if self._ring is not None:
            self._ring.give_back(lease, mark)

    def give_up(self, idle: Callable[[WeightGroup], bool]) -> list[WeightGroup]:
        """Gives up the latest piece whose groups are all `idle`; returns these: they do not stay any more."""
        for index, (room, groups) in reversed(list(enumerate(self._chunks))):
            if all(map(idle, groups)):
                del self._chunks[index]
                for group in groups:
                    del self._places[group]
                    self.resident.remove(group)
                self._count(-room.nbytes)
                return groups
        return []

    def lend(self, idle: Callable[[WeightGroup], bool]) -> list[WeightGroup]:
        """As `give_up`, but until `clear`."""
        lent = self.give_up(idle)
        self._lent += lent
        return lent

    @property
    def lent(self) -> int:
        """How many bytes were lent."""
        return _size(self._lent)

    @property
    def whole(self) -> int:
        """How many bytes are taken, or were before they were lent."""
        return self._counted + self.lent

    def clear(self) -> None:
        """Everything is given back."""
        self._forget()
        self.resident.update(self._lent)
        self._lent = []
        self._recorder.hold(self, 0)


def _size(chunk: Iterable[WeightGroup]) -> int:
    return sum(map(_aligned, chunk))


def _aligned(group: WeightGroup) -> int:
    return -(-group.size // group.store.alignment) * group.store.alignment
