"""Device memory for one component's weights: resident groups, the ring buffer, and loading on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.copy_stream import CopyStream
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder
from tightfit.plan.component_cost import chunks
from tightfit.plan.prefetch import ALIGNMENT, Lease, Ring

__all__ = ["DeviceWeightPool", "OnDemandLoader"]


PLACES = 32  # offsets in the ring for which a group's parameters are kept: after some calls, the same few recur


class DeviceWeightPool:
    """Memory in few large chunks, reported to `recorder`: for groups named in `resident`, and a `ring` in bytes."""

    def __init__(
        self, groups: Sequence[WeightGroup], resident: Collection[str], ring: int, device: Device, recorder: Recorder
    ) -> None:
        self._device, self._recorder = device, recorder
        self._resident = [group for group in groups if group.name in resident]
        self._passing = [group for group in groups if group.name not in resident]
        self._planned = self._ring_size = ring
        self._made_for = _size(self._passing)  # bytes of streamed groups that the ring was planned for
        self._lent: list[WeightGroup] = []
        self.resident = set(self._resident)  # groups that have a region of their own, or will have one
        self._forget()

    def _forget(self) -> None:
        self._expected: list[list[WeightGroup]] = []  # resident groups, in chunks not allocated yet
        self._chunks: list[tuple[torch.Tensor, list[WeightGroup]]] = []
        self._regions: dict[WeightGroup, LoadedGroup] = {}
        self._known: dict[WeightGroup, dict[int, LoadedGroup]] = {}  # by offset in the ring
        self._ring: Ring | None = None
        self._ring_memory = torch.empty(0, dtype=torch.uint8)
        self._counted = 0

    def open(self) -> None:
        """Allow allocation until `clear`; the ring is larger where other code made the weights larger."""
        self._expected = list(chunks((group for group in self._resident if group in self.resident), _aligned))
        grown = _size(self._passing) > self._made_for
        self._ring_size = self._ring_for(self._passing) if grown else self._planned

    def _ring_for(self, passing: Sequence[WeightGroup]) -> int:
        """Return bytes for about as many of `passing` as planned, and at least for the largest."""
        largest = max(-(-group.size // ALIGNMENT) * ALIGNMENT for group in passing)
        return max(self._planned * _size(passing) // self._made_for, largest)

    def take_some(self, limit: int) -> None:
        """Allocate as much as stays within `limit` bytes in total; the ring first."""
        if self._ring is None and (self._ring_size > limit or not self._take_ring()):
            return
        while self._expected and self._counted + _size(self._expected[0]) <= limit:
            if not self._take_chunk():
                return

    def take(self) -> list[WeightGroup]:
        """Allocate all that is missing; return the resident groups for which there was no memory.

        Raises torch.OutOfMemoryError where not even the ring fits.
        """
        while self._expected and self._take_chunk():
            pass
        left = [group for chunk in self._expected for group in chunk]
        self._expected = []
        self.resident.difference_update(left)
        while self._ring is None and not self._take_ring():
            given_up = self.give_up(lambda _: True)
            if not given_up:
                self._ring_memory, self._ring = self.extra(self._ring_size), Ring(self._ring_size)
            left += given_up
        return left

    def _take_chunk(self) -> bool:
        """Allocate the next chunk of resident groups; return whether there was memory for it."""
        memory = self._allocate_or_none(_size(self._expected[0]))
        if memory is None:
            return False
        chunk = self._expected.pop(0)
        self._chunks.append((memory, chunk))
        offset = 0
        for group in chunk:
            self._regions[group] = LoadedGroup(group, memory[offset : offset + group.size])
            offset += _aligned(group)
        return True

    def _take_ring(self) -> bool:
        memory = self._allocate_or_none(self._ring_size)
        if memory is not None:
            self._ring_memory, self._ring = memory, Ring(self._ring_size)
        return memory is not None

    def extra(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes for a single use; they are not counted here."""
        with self._recorder.uncounted(), torch.inference_mode(False):  # calls in another mode use it too
            return self._device.allocate(size)

    def _allocate_or_none(self, size: int) -> torch.Tensor | None:
        try:
            memory = self.extra(size)
        except torch.OutOfMemoryError:
            return None
        self._count(size)
        return memory

    def _count(self, size: int) -> None:
        self._counted += size
        self._recorder.hold(self, self._counted)

    def region_of(self, group: WeightGroup) -> LoadedGroup | None:
        """Return the region of the resident `group`; None while it is not allocated."""
        return self._regions.get(group)

    def lease(self, group: WeightGroup) -> LoadedGroup | None:
        """Return a region of the ring for `group`; None while none is free."""
        lease = None if self._ring is None else self._ring.take(group.size)
        if lease is None:
            return None
        known = self._known.setdefault(group, {})
        found = known.get(lease.offset)
        if found is None:
            if len(known) >= PLACES:
                known.clear()
            region = self._ring_memory[lease.offset : lease.offset + group.size]
            found = known[lease.offset] = LoadedGroup(group, region)
        found.lease = lease
        return found

    def give_back(self, lease: Lease, mark: object) -> None:
        """Free `lease` in the ring for copies that wait for `mark`."""
        if self._ring is not None:
            self._ring.give_back(lease, mark)

    def give_up(self, idle: Callable[[WeightGroup], bool]) -> list[WeightGroup]:
        """Free the latest chunk whose groups are all `idle`; return these groups, which are no longer resident."""
        for index, (memory, groups) in reversed(list(enumerate(self._chunks))):
            if all(map(idle, groups)):
                del self._chunks[index]
                for group in groups:
                    del self._regions[group]
                    self.resident.remove(group)
                self._count(-memory.nbytes)
                return groups
        return []

    def lend(self, idle: Callable[[WeightGroup], bool]) -> list[WeightGroup]:
        """Like `give_up`, but only until `clear`."""
        lent = self.give_up(idle)
        self._lent += lent
        return lent

    @property
    def lent(self) -> int:
        """Bytes that were lent."""
        return _size(self._lent)

    @property
    def whole(self) -> int:
        """Bytes that are allocated, and bytes that were lent."""
        return self._counted + self.lent

    @property
    def planned(self) -> int:
        """Bytes that the plan gives to weights: resident groups and the ring."""
        return _size(self._resident) + self._planned

    def clear(self) -> None:
        """Free everything."""
        self._forget()
        self.resident.update(self._lent)
        self._lent = []
        self._recorder.hold(self, 0)


def _size(chunk: Iterable[WeightGroup]) -> int:
    return sum(map(_aligned, chunk))


def _aligned(group: WeightGroup) -> int:
    return -(-group.size // group.store.alignment) * group.store.alignment


class OnDemandLoader:
    """Loads weights on demand, and keeps the last group, because its other weights are often read next."""

    def __init__(self, pool: DeviceWeightPool, stream: CopyStream, recorder: Recorder) -> None:
        self._pool, self._stream, self._recorder = pool, stream, recorder
        self._last: tuple[WeightGroup, list[nn.Parameter]] | None = None

    def fetch(self, group: WeightGroup, index: int) -> torch.Tensor:
        """Return a copy of one weight of `group`."""
        if self._last is None or self._last[0] is not group:
            self._last = None
            self._recorder.loaded_on_demand(read=True)
            with self._recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
                region = self._pool.extra(group.size)
                group.store.send(self._stream, region, self._stream.mark()).wait_on_device()
                self._recorder.moved(bytes_in=group.size)
                self._last = (group, group.views(region))
        return self._last[1][index].detach().clone()

    def forget(self) -> None:
        """Free the memory of the last group."""
        self._last = None
