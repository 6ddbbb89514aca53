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
    """Brings `groups`, those in `resident` once, and the others through a ring of `ring` bytes."""

    def __init__(
        self, groups: Sequence[WeightGroup], resident: Collection[str], ring: int, device: Device, recorder: Recorder
    ) -> None:
        self._groups = list(groups)
        self._device, self._recorder = device, recorder
        self.device_bytes = False  # whether it has memory on the device
        self._complete = False  # whether it has all that it will take
        self._make_way: Callable[[int], None] | None = None  # told in the last pass how many bytes were given up
        self._stream = device.copy_stream()
        self._orders: dict[str, PrefetchOrder[WeightGroup]] = {}
        self._order: PrefetchOrder[WeightGroup] = PrefetchOrder(self._groups)
        self._away = LazyWeights(groups, device, recorder, self.fetch)
        self._behind = behind_gates(self._groups)
        self._entered: Counter[nn.Module] = Counter()  # gates in whose forward passes groups are in use, and how often
        self._here: dict[WeightGroup, LoadedGroup] = {}
        self._rooms = DeviceWeightPool(groups, resident, ring, device, recorder)
        self._fetcher = OnDemandLoader(self._rooms, self._stream, recorder)
        self._began: Any = None  # marks when memory was taken

    def owned(self) -> Iterator[torch.Tensor]:
        """What modules may find where they look the groups' weights up."""
        for group in self._groups:
            yield from group.masters
            yield from self._away[group]
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
        self._stream.follow_host()
        self._take_memory()
        self._choose_order(method)
        self._make_way = make_way
        self._order.begin(last=make_way is not None)
        self._send_ahead()

    def approach(self, limit: int, method: str = "forward", most: int | None = None) -> None:
        """Its turn is next: what it needs first, up to `most` bytes, starts to come into at most `limit` bytes."""
        if self._complete:
            return
        self._stream.follow_host()
        self._appear()
        self._choose_order(method)
        self._rooms.take_some(limit)
        self._began = self._stream.mark()
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
            order = self._orders[method] = PrefetchOrder(list(expected_in(method, self._groups)))
        if order is not self._order:
            self._order = order
            order.rewind()

    def end(self) -> None:
        """The pass has come to its end."""
        self._order.end()
        self._send_ahead()
        self._stream.mark()  # for a pass on another stream

    def expect(self, gates: Sequence[nn.Module]) -> None:
        """Of this pass it is known in which order `gates` are at work from now on."""
        groups = [group for gate in gates for group in self._behind[gate]]
        if self._complete and self._order.expect(groups):
            self._send_ahead()  # what is here already, and is needed soon, is looked at; the rest makes room
            self._drop(lambda other: not self._order.awaited(other))
            self._send_ahead()

    def enter(self, gate: nn.Module) -> None:
        """A forward pass of `gate` begins: its groups are in use until it is left, or none is if this raises."""
        groups = self._behind[gate]
        if len(groups) == 1:
            self._need(groups[0])
        else:
            self._need_all(groups)
        self._entered[gate] += 1

    def _need_all(self, groups: Sequence[WeightGroup]) -> None:
        used = []
        try:
            for group in groups:
                self._need(group)
                used.append(group)
        except BaseException:
            for group in used:
                self._done(group)
            raise

    def leave(self, gate: nn.Module) -> None:
        """The forward pass of `gate` is over; torch says so too where entering it failed."""
        if self._entered[gate]:
            self._entered[gate] -= 1
            for group in self._behind[gate]:
                self._done(group)

    def _need(self, group: WeightGroup) -> None:
        """`group` is used from now on, until it is `_done`."""
        if not self._complete:
            self.begin()
        self._device.use_layer()
        expected = self._order.used(group)
        if not expected:
            self._drop(lambda other: self._order.passed(other) and other is not group)
        here = self._here.get(group)
        if here is None:
            self._send_now(group)
            here = self._here[group]
        if not here.visible:
            try:
                here.show(self._away, self._recorder)
            except BaseException:
                self._leave([group])  # it did not come, or not all of it: the next who needs it asks anew
                raise
        here.users += 1

    def _done(self, group: WeightGroup) -> None:
        here = self._here.get(group)
        if here is None or not here.let_go():
            return
        here.hide(self._away)  # what stays too: a LoRA that is fused between two passes writes into what modules find
        del here  # which would keep memory that is given up below
        if group not in self._rooms.resident and not self._order.awaited(group):
            self._release(group)
            self._send_ahead()
        if self._make_way is not None:
            self._give_way(self._make_way)

    def _give_way(self, make_way: Callable[[int], None]) -> None:
        """Gives up the places of what is over, and says so."""
        self._leave(self._rooms.lend(lambda group: self._order.over(group) and self._idle(group)))
        if self._order.looked_through:
            make_way(self._rooms.lent)

    def set_aside(self) -> None:
        """Where masters have no values, modules find what fetches them, from now on."""
        self._away.set_aside()

    def give_back(self, file_weights: FileBackedWeights | None = None) -> None:
        """The masters have their own values again, or are on a `file_weights`, and what was written in the meantime."""
        self._away.give_back(file_weights)

    def clear(self) -> None:
        """Everything goes, and modules find the masters again; whatever state an interruption left."""
        for group in self._groups:
            if (here := self._here.get(group)) is not None:
                here.handle.cancel()
                here.hide(self._away)
            self._away.keep(group)
            if group.store.writable:
                group.show(self._away[group], group.masters)
        self._here = {}
        forget_casts()
        self._entered.clear()
        self._fetcher.forget()
        self._order.rewind()
        self._rooms.clear()
        self._make_way = None
        self.device_bytes = self._complete = False

    # sending

    def _send_ahead(self) -> None:
        self._order.look_ahead(self._send_if_room)

    def _send_if_room(self, group: WeightGroup) -> bool:
        if group in self._here:
            return True
        resident = group in self._rooms.resident
        place = self._rooms.place(group) if resident else self._rooms.lease(group)
        if place is None:
            return False
        after = None if place.lease is None else place.lease.after
        self._send(place, self._began if after is None else after)
        return True

    def _send_now(self, group: WeightGroup) -> None:
        """What was not foreseen: others that only wait make room for it."""
        self._recorder.unforeseen(learning=not self._order.known)
        if self._send_if_room(group):
            return
        self._drop(lambda other: other is not group)
        if not self._send_if_room(group):  # several at once, more than the ring was made for
            self._send(LoadedGroup(group, self._rooms.extra(group.size)), self._stream.mark())

    def _send(self, here: LoadedGroup, after: Any) -> None:
        group = here.group
        if group not in self._rooms.resident:
            self._device.send_layer()
        with self._recorder.uncounted():
            here.handle = group.store.send(self._stream, here.region, after)
        self._recorder.moved(bytes_in=group.size)
        here.users = 0
        self._here[group] = here

    def fetch(self, group: WeightGroup, index: int) -> torch.Tensor:
        """One weight that code looks at while nobody has said that it is needed."""
        if (here := self._here.get(group)) is not None:
            self._recorder.waited(here.handle.wait_on_device())
            return here.copy_of(index)
        return self._fetcher.fetch(group, index)

    # memory

    def _appear(self) -> None:
        """Modules find that everything is away, and memory is taken from now on."""
        if self.device_bytes:
            return
        self.device_bytes = True
        for group in self._groups:
            if group.keep_up():
                self._away.renew(group)
                if group.store.lock_refused:
                    self._recorder.note("page-locking was refused for weights that had been changed")
            group.show(group.masters, self._away[group])
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
        self._began = self._stream.mark()
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
        return sum(group.size for group in left)

    def _idle(self, group: WeightGroup) -> bool:
        return group not in self._here or not self._here[group].users

    def _leave(self, groups: Iterable[WeightGroup]) -> None:
        """What is on the device of `groups` goes, needed or not."""
        for group in groups:
            if group in self._here:
                self._here[group].handle.cancel()
                self._release(group)

    def _release(self, group: WeightGroup) -> None:
        here = self._here.pop(group)
        here.hide(self._away)
        forget_casts()
        if here.lease is not None:
            self._rooms.give_back(here.lease, self._stream.mark())

    def _drop(self, which: Callable[[WeightGroup], bool]) -> None:
        """Gives up what was sent ahead into the ring and nobody uses, where `which` says so."""
        idle = [p for p in self._here if self._idle(p) and p not in self._rooms.resident and which(p)]
        self._leave(idle)
        if idle:
            self._order.look_again()
