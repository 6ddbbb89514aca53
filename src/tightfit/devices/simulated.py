"""A simulated card as a `Device`: every operation on a real card also runs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightfit.catalog.clock import sustained_share
from tightfit.catalog.cuda import PAGE_TAIL
from tightfit.devices.copy_stream import CopyStream, PendingCopy
from tightfit.devices.device import Device, Multiprocessors
from tightfit.devices.pinned_pool import is_dense
from tightfit.errors import InputError
from tightfit.simulator.backend import SIMULATOR_LOCK, cards_in_use
from tightfit.simulator.backward import ReleasedSaves
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.host_memory import is_pinned, pin
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import free_dead_tensors, store_of
from tightfit.simulator.timeline import Point

__all__ = ["SimulatedDevice"]


class SimulatedDevice(Device):
    """Simulated card number `index` of those in use; times are in simulated seconds. InputError if there is none.

    If its accelerator is a CPU, it is not a card: its memory is the host's.
    """

    kind = "simulated"
    swaps_parameters = True

    call_lock = SIMULATOR_LOCK
    takes_threads = False  # its clock is advanced by the computing thread only
    _beside = 0  # the stream of `copy_beside`; 0: none yet

    def __init__(self, index: int = 0) -> None:
        with SIMULATOR_LOCK:  # not while another thread measures
            cards = cards_in_use()
        if not 0 <= index < len(cards):
            raise InputError(
                f"no such device: simulated:{index}; {len(cards)} simulated cards are in use", cards=len(cards)
            )
        self.card = cards[index]
        self.separate = not self.card.accelerator.is_cpu
        self.torch_device = torch.device(NAME, index)
        self.name = f"simulated:{index}"

    def compute_capability(self) -> str | None:
        return self.card.accelerator.compute_capability

    def product_name(self) -> str | None:
        return self.card.accelerator.product_name or self.card.accelerator.name

    def multiprocessors(self) -> Multiprocessors | None:
        like = self.card.accelerator
        if not like.multiprocessors or not like.clock or not like.cache_bytes:
            return None
        nominal = like.clock / sustained_share(like.compute_capability or "", like.name)
        return Multiprocessors(like.multiprocessors, nominal, like.cache_bytes)

    def saved_tensors(self) -> ReleasedSaves:
        return ReleasedSaves()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(self.torch_device, non_blocking=True)
        self.card.copy_in(tensor.nbytes, pinned=False, wait=False)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.card.values == "real":
            return tensor.to("cpu")
        self.card.copy_out(tensor.nbytes, pinned=False, wait=True)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def copy_stream(self) -> CopyStream:
        return _SimulatedCopyStream(self.card)

    def copy_beside(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        card, source = self.card, tensor if is_dense(tensor) else tensor.clone()
        beside = self._beside = self._beside or card.new_stream()
        card.timeline.wait(beside, card.record())
        with card.on(beside):
            copy = source.to(target, non_blocking=True)
        block = store_of(source).block
        if block is not None:
            card.allocator.use(block, beside)
        return copy

    def allocate(self, size: int) -> torch.Tensor:
        whole = super().allocate(size)
        if self.card.values == "shapes":
            store_of(whole).values = None  # it will hold weights, which have only shapes
        return whole

    def allocate_host(self, size: int) -> torch.Tensor:
        if self.card.values == "shapes":
            return torch.empty(size, dtype=torch.uint8, device="meta")
        return super().allocate_host(size)

    def pinnable(self) -> int:
        return 2**60

    def lock_pages(self, buffer: torch.Tensor) -> Callable[[], None] | None:
        pin(buffer)
        return lambda: None

    def pinned(self, size: int) -> torch.Tensor:
        return pin(torch.empty(size, dtype=torch.uint8))

    def total_bytes(self) -> int:
        return self.card.accelerator.bytes

    def free_bytes(self) -> int:
        free_dead_tensors()
        return self.card.allocator.capacity - self.card.allocator.allocated.now

    def allocated_bytes(self) -> int:
        free_dead_tensors()
        return self.card.live.now

    def peak_bytes(self) -> int:
        return self.card.live.peak

    def peak_reserved_bytes(self) -> int:
        return self.card.held.peak

    def reset_peak(self) -> None:
        free_dead_tensors()
        self.card.held.reset_peak()
        self.card.live.reset_peak()

    def charge_layer_overhead(self) -> None:
        self.card.host.work(round(self.card.accelerator.resident_overhead * 1e9))

    def charge_transfer_overhead(self) -> None:
        like = self.card.accelerator
        self.card.host.work(round((like.streamed_overhead - like.resident_overhead) * 1e9))

    def synchronize(self) -> None:
        self.card.timeline.synchronize()

    def use_expandable_segments(self) -> Callable[[], None]:
        allocator = self.card.allocator
        before, allocator.expandable = allocator.expandable, True
        return lambda: setattr(allocator, "expandable", before)

    def limit_memory(self, size: int) -> Callable[[], None]:
        allocator = self.card.allocator
        size = max(size - PAGE_TAIL, 0) if allocator.expandable else size  # as on CUDA
        before, capped = allocator.capacity, min(allocator.capacity, size)
        allocator.capacity = capped

        def undo() -> None:
            if allocator.capacity == capped:  # else the capacity was changed elsewhere
                allocator.capacity = before

        return undo

    def release_cache(self) -> None:
        self.card.allocator.empty_cache()

    def now(self) -> float:
        return self.card.now * 1e-9


class _SimulatedCopyStream(CopyStream):
    """A separate stream of the card for copies."""

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        self._place = torch.device(NAME, card.index)
        self._stream = card.new_stream()

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        card = self._card
        with card.on(self._stream):
            if after is not None:
                card.timeline.wait(self._stream, after)
            if source.is_meta:
                card.copy_in(source.nbytes, pinned=True, wait=False)
            elif target.is_meta:  # copies to memory that is not page-locked block the host, as on a card
                card.copy_out(source.nbytes, pinned=is_pinned(target), wait=False)
            else:
                target.copy_(source, non_blocking=is_pinned(target if source.device == self._place else source))
            return _SimulatedCopy(card, card.record())

    def follow(self, copy: PendingCopy) -> None:
        assert isinstance(copy, _SimulatedCopy)
        self._card.timeline.wait(self._stream, copy.point)

    def mark(self) -> Point:
        return self._card.record()


class _SimulatedCopy(PendingCopy):
    def __init__(self, card: SimulatedCard, point: Point) -> None:
        self._card, self.point = card, point

    def wait_on_device(self) -> float:
        self._card.timeline.wait(self._card.stream, self.point)
        return 0.0

    def synchronize(self) -> None:
        self.point.wait()
