"""One component's weights on the device: what stays, what passes through the ring, and what comes when.

Everything is sent in the order in which it will be used, as far ahead as there is room; the wait for it is the
device's, not the host's. What is needed and has not been sent, because the order was not foreseen, is sent then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.apply.module_hooks import watch
from tightfit.apply.weights.device_pool import DeviceWeightPool
from tightfit.apply.weights.file_weights import FileBackedWeights
from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.offloaded_parameter import LazyWeights
from tightfit.apply.weights.on_demand import OnDemandLoader
from tightfit.apply.weights.weight_groups import WeightGroup, behind_gates, expected_in
from tightfit.apply.weights.weight_store import forget_casts
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder
from tightfit.plan.prefetch import PrefetchOrder

__all__ = ["Streamer"]


class Streamer:
    """Brings `parcels`, those in `stays` once, and the others through a ring of `ring` bytes."""

    def __init__(
        self, parcels: Sequence[WeightGroup], stays: Collection[str], ring: int, device: Device, recorder: Recorder
    ) -> None:
        self._parcels = list(parcels)
        self._device, self._recorder = device, recorder
        self.aboard = False  # whether it has memory on the device
        self._complete = False  # whether it has all that it will take
        self._make_way: Callable[[int], None] | None = None  # told in the last pass how many bytes were given up
        self._lane = device.copy_stream()
        self._orders: dict[str, PrefetchOrder[WeightGroup]] = {}
        self._order: PrefetchOrder[WeightGroup] = PrefetchOrder(self._parcels)
        self._away = LazyWeights(parcels, device, recorder, self.fetch)
        self._behind = behind_gates(self._parcels)
        self._entered: Counter[nn.Module] = Counter()  # gates in whose forward passes parcels are in use, and how often
        self._here: dict[WeightGroup, LoadedGroup] = {}
        self._rooms = DeviceWeightPool(parcels, stays, ring, device, recorder)
        self._fetcher = OnDemandLoader(self._rooms, self._lane, recorder)
        self._began: Any = None  # marks when memory was taken

    def owned(self) -> Iterator[torch.Tensor]:
        """What modules may find where they look the parcels' weights up."""
        for parcel in self._parcels:
            yield from parcel.masters
            yield from self._away[parcel]
        for here in self._here.values():
            yield from here.weights

    def hook(self, undo: Callable[..., object]) -> None:
        """Lets the modules tell when they work; `undo` is given how to stop it."""
        for gate in self._behind:
            watch(gate, partial(self.enter, gate), partial(self.leave, gate), undo, self.expect)

    def begin(self, method: str = "forward", make_way: Callable[[int], None] | None = None) -> None:
        """A pass begins: what is first needed starts to come.

        With `make_way` it is the last pass: what was used gives up its memory, and `make_way` is told how many bytes
        those are by now, as soon as nothing of this component is waiting to come.
        """
        if self._make_way is not None:  # it was not the last, after all
            self.clear()
        self._lane.follow_host()
        self._take_memory()
        self._choose_order(method)
        self._make_way = make_way
        self._order.begin(last=make_way is not None)
        self._send_ahead()

    def approach(self, limit: int, method: str = "forward", most: int | None = None) -> None:
        """Its turn is next: what it needs first, up to `most` bytes, starts to come into at most `limit` bytes."""
        if self._complete:
            return
        self._lane.follow_host()
        self._appear()
        self._choose_order(method)
        self._rooms.take_some(limit)
        self._began = self._lane.mark()
        self._order.look_ahead(
            lambda one: (most is None or sum(p.size for p in (*self._here, one)) <= most) and self._send_if_room(one)
        )

    @property
    def room(self) -> int:
        """Bytes on the device that are for it, with what it has given up in its last pass."""
        return self._rooms.whole

    def _choose_order(self, method: str) -> None:
        order = self._orders.get(method)
        if order is None:
            order = self._orders[method] = PrefetchOrder(list(expected_in(method, self._parcels)))
        if order is not self._order:
            self._order = order
            order.rewind()

    def end(self) -> None:
        """The pass has come to its end."""
        self._order.end()
        self._send_ahead()
        self._lane.mark()  # for a pass on another stream

    def expect(self, gates: Sequence[nn.Module]) -> None:
        """Of this pass it is known in which order `gates` are at work from now on."""
        parcels = [parcel for gate in gates for parcel in self._behind[gate]]
        if self._complete and self._order.expect(parcels):
            self._send_ahead()  # what is here already, and is needed soon, is looked at; the rest makes room
            self._drop(lambda other: not self._order.awaited(other))
            self._send_ahead()

    def enter(self, gate: nn.Module) -> None:
        """A forward pass of `gate` begins: its parcels are in use until it is left, or none is if this raises."""
        parcels = self._behind[gate]
        if len(parcels) == 1:
            self._need(parcels[0])
        else:
            self._need_all(parcels)
        self._entered[gate] += 1

    def _need_all(self, parcels: Sequence[WeightGroup]) -> None:
        used = []
        try:
            for parcel in parcels:
                self._need(parcel)
                used.append(parcel)
        except BaseException:
            for parcel in used:
                self._done(parcel)
            raise

    def leave(self, gate: nn.Module) -> None:
        """The forward pass of `gate` is over; torch says so too where entering it failed."""
        if self._entered[gate]:
            self._entered[gate] -= 1
            for parcel in self._behind[gate]:
                self._done(parcel)

    def _need(self, parcel: WeightGroup) -> None:
        """`parcel` is used from now on, until it is `_done`."""
        if not self._complete:
            self.begin()
        self._device.use_layer()
        expected = self._order.used(parcel)
        if not expected:
            self._drop(lambda other: self._order.passed(other) and other is not parcel)
        here = self._here.get(parcel)
        if here is None:
            self._send_now(parcel)
            here = self._here[parcel]
        if not here.visible:
            try:
                here.show(self._away, self._recorder)
            except BaseException:
                self._leave([parcel])  # it did not come, or not all of it: the next who needs it asks anew
                raise
        here.users += 1

    def _done(self, parcel: WeightGroup) -> None:
        here = self._here.get(parcel)
        if here is None or not here.let_go():
            return
        here.hide(self._away)  # what stays too: a LoRA that is fused between two passes writes into what modules find
        del here  # which would keep memory that is given up below
        if parcel not in self._rooms.stays and not self._order.awaited(parcel):
            self._release(parcel)
            self._send_ahead()
        if self._make_way is not None:
            self._give_way(self._make_way)

    def _give_way(self, make_way: Callable[[int], None]) -> None:
        """Gives up the places of what is over, and says so."""
        self._leave(self._rooms.lend(lambda parcel: self._order.over(parcel) and self._idle(parcel)))
        if self._order.looked_through:
            make_way(self._rooms.lent)

    def set_aside(self) -> None:
        """Where masters have no values, modules find what fetches them, from now on."""
        self._away.set_aside()

    def give_back(self, shelf: FileBackedWeights | None = None) -> None:
        """The masters have their own values again, or are on a `shelf`, and what was written in the meantime."""
        self._away.give_back(shelf)

    def clear(self) -> None:
        """Everything goes, and modules find the masters again; whatever state an interruption left."""
        for parcel in self._parcels:
            if (here := self._here.get(parcel)) is not None:
                here.arrival.cancel()
                here.hide(self._away)
            self._away.keep(parcel)
            if parcel.home.writable:
                parcel.show(self._away[parcel], parcel.masters)
        self._here = {}
        forget_casts()
        self._entered.clear()
        self._fetcher.forget()
        self._order.rewind()
        self._rooms.clear()
        self._make_way = None
        self.aboard = self._complete = False

    # sending

    def _send_ahead(self) -> None:
        self._order.look_ahead(self._send_if_room)

    def _send_if_room(self, parcel: WeightGroup) -> bool:
        if parcel in self._here:
            return True
        stays = parcel in self._rooms.stays
        place = self._rooms.place(parcel) if stays else self._rooms.lease(parcel)
        if place is None:
            return False
        after = None if place.lease is None else place.lease.after
        self._send(place, self._began if after is None else after)
        return True

    def _send_now(self, parcel: WeightGroup) -> None:
        """What was not foreseen: others that only wait make room for it."""
        self._recorder.unforeseen(learning=not self._order.known)
        if self._send_if_room(parcel):
            return
        self._drop(lambda other: other is not parcel)
        if not self._send_if_room(parcel):  # several at once, more than the ring was made for
            self._send(LoadedGroup(parcel, self._rooms.extra(parcel.size)), self._lane.mark())

    def _send(self, here: LoadedGroup, after: Any) -> None:
        parcel = here.parcel
        if parcel not in self._rooms.stays:
            self._device.send_layer()
        with self._recorder.uncounted():
            here.arrival = parcel.home.send(self._lane, here.region, after)
        self._recorder.moved(bytes_in=parcel.size)
        here.users = 0
        self._here[parcel] = here

    def fetch(self, parcel: WeightGroup, index: int) -> torch.Tensor:
        """One weight that code looks at while nobody has said that it is needed."""
        if (here := self._here.get(parcel)) is not None:
            self._recorder.waited(here.arrival.wait_on_device())
            return here.copy_of(index)
        return self._fetcher.fetch(parcel, index)

    # memory

    def _appear(self) -> None:
        """Modules find that everything is away, and memory is taken from now on."""
        if self.aboard:
            return
        self.aboard = True
        for parcel in self._parcels:
            if parcel.keep_up():
                self._away.renew(parcel)
                if parcel.home.lock_refused:
                    self._recorder.note("page-locking was refused for weights that had been changed")
            parcel.show(parcel.masters, self._away[parcel])
        self._rooms.open()

    def _take_memory(self) -> None:
        """Room for what stays and for the ring."""
        if self._complete:
            return
        self._appear()
        try:
            left = self._rooms.take()
        except torch.OutOfMemoryError:
            self.clear()
            raise
        self._complete = True
        self._began = self._lane.mark()
        if left:
            self._leave(left)
            self._recorder.ran_out("out of memory before a component's first layer", sum(p.size for p in left))

    def shed(self) -> int:
        """Gives up some of what stays and is not in use; returns how many bytes that were.

        It passes through the ring from now on.
        """
        left = self._rooms.give_up(self._idle)
        self._leave(left)
        if left:
            self._order.spoil()
        return sum(parcel.size for parcel in left)

    def _idle(self, parcel: WeightGroup) -> bool:
        return parcel not in self._here or not self._here[parcel].users

    def _leave(self, parcels: Iterable[WeightGroup]) -> None:
        """What is on the device of `parcels` goes, needed or not."""
        for parcel in parcels:
            if parcel in self._here:
                self._here[parcel].arrival.cancel()
                self._release(parcel)

    def _release(self, parcel: WeightGroup) -> None:
        here = self._here.pop(parcel)
        here.hide(self._away)
        forget_casts()
        if here.lease is not None:
            self._rooms.give_back(here.lease, self._lane.mark())

    def _drop(self, which: Callable[[WeightGroup], bool]) -> None:
        """Gives up what was sent ahead into the ring and nobody uses, where `which` says so."""
        idle = [p for p in self._here if self._idle(p) and p not in self._rooms.stays and which(p)]
        self._leave(idle)
        if idle:
            self._order.look_again()
