"""One component's weights on the device: resident groups, groups in the ring buffer, and when each is loaded.

Groups are sent in the order of their use, as far ahead as memory allows; the device waits for them, not the host.
A group that is needed and was not sent, because the order was not predicted, is sent then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.apply.module_hooks import watch
from tightfit.apply.weights.device_pool import DeviceWeightPool, OnDemandLoader
from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.offloaded_parameter import LazyWeights
from tightfit.apply.weights.weight_groups import WeightGroup, behind_gates, expected_in, groups_inside
from tightfit.apply.weights.weight_store import forget_casts
from tightfit.devices.device import Device
from tightfit.measure.recorder import Recorder
from tightfit.plan.prefetch import PrefetchOrder
from tightfit.plan.prefetch_policy import PrefetchPolicy

__all__ = ["Streamer"]


class Streamer(PrefetchPolicy[WeightGroup]):
    """Loads `groups`: those named in `resident` once, the others through a ring buffer of `ring` bytes."""

    _loaded: dict[WeightGroup, LoadedGroup]

    def __init__(
        self, groups: Sequence[WeightGroup], resident: Collection[str], ring: int, device: Device, recorder: Recorder
    ) -> None:
        self._groups = list(groups)
        self._pool = DeviceWeightPool(groups, resident, ring, device, recorder)
        super().__init__(PrefetchOrder(self._groups), self._pool.resident)
        self._device, self._recorder = device, recorder
        self.on_device = self._complete = False  # whether it may have memory on the device; whether it has all of it
        self._on_freed: Callable[[int], None] | None = None  # in the last call: called with the bytes given up so far
        self._stream = device.copy_stream()
        self._orders: dict[str, PrefetchOrder[WeightGroup]] = {}
        self._placeholders = LazyWeights(groups, device, recorder, self.fetch)
        self._behind = behind_gates(self._groups)
        self._entered: Counter[nn.Module] = Counter()  # running forward passes of each gate
        self._fetcher = OnDemandLoader(self._pool, self._stream, recorder)
        self._began: Any = None  # mark of when memory was allocated

    def owned(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that modules may have in place of the groups' weights."""
        for group in self._groups:
            yield from group.source_params
            yield from self._placeholders[group]
        for here in self._loaded.values():
            yield from here.weights

    def hook(self, undo: Callable[..., object]) -> None:
        """Register hooks on the modules that use the groups; `undo` receives how to remove them."""
        for gate in self._behind:
            watch(gate, partial(self.enter, gate), partial(self.leave, gate), undo, self.expect)

    def begin(self, method: str = "forward", make_way: Callable[[int], None] | None = None) -> None:
        """Begin a call of `method`: start to load the groups that are needed first.

        With `make_way` it is the last call: groups that were used give up their memory, and `make_way` is called with
        the bytes given up so far, as soon as no group of this component has still to be sent.
        """
        if self._on_freed is not None:  # it was not the last, after all
            self.clear()
        self._stream.follow_host()
        self._take_memory()
        self._choose_order(method)
        self._on_freed = make_way
        self._order.begin(last=make_way is not None)
        self._send_ahead()

    def prefetch(self, limit: int, method: str = "forward", most: int | None = None) -> None:
        """Prefetch for the next call: send what it needs first, up to `most` bytes, into at most `limit` bytes."""
        if self._complete:
            return
        self._stream.follow_host()
        self._install_placeholders()
        self._choose_order(method)
        self._pool.take_some(limit)
        self._began = self._stream.mark()
        self._order.look_ahead(
            lambda one: (most is None or sum(p.size for p in (*self._loaded, one)) <= most) and self._send_if_room(one)
        )

    @property
    def device_bytes(self) -> int:
        """Bytes on the device for this component, with those given up in its last call."""
        return self._pool.whole

    def _choose_order(self, method: str) -> None:
        order = self._orders.get(method)
        if order is None:
            order = self._orders[method] = PrefetchOrder(list(expected_in(method, self._groups)))
        if order is not (self._usual or self._order):
            self._order, self._usual = order, None
            order.rewind()

    def end(self) -> None:
        """End the call."""
        self._end_call()
        self._stream.mark()  # for a call on another stream

    def expect(self, gates: Sequence[nn.Module]) -> None:
        """Set the order in which `gates` run from now on in this call."""
        groups = [group for gate in gates for group in self._behind[gate]]
        if self._complete:
            self.expect_uses(groups)

    def without(self, modules: Iterable[nn.Module], then: Iterable[nn.Module] = ()) -> int:
        """Expect nothing in `modules` any more in this call, nor `then` in the next; return bytes loaded in vain."""
        left, later = (groups_inside(self._groups, each) if each else None for each in map(tuple, (modules, then)))
        changes = self._complete and (left is not None or later is not None or self._usual is not None)
        return sum(group.size for group in self.leave_out(left, later)) if changes else 0

    def enter(self, gate: nn.Module) -> None:
        """Begin a forward pass of `gate`: its groups are in use until `leave`, or none is if this raises."""
        used: list[WeightGroup] = []
        try:
            for group in self._behind[gate]:
                self._need(group)
                used.append(group)
        except BaseException:
            for group in used:
                self._done(group)
            raise
        self._entered[gate] += 1

    def leave(self, gate: nn.Module) -> None:
        """End a forward pass of `gate`; torch calls this too where `enter` failed."""
        if self._entered[gate]:
            self._entered[gate] -= 1
            for group in self._behind[gate]:
                self._done(group)

    def _need(self, group: WeightGroup) -> None:
        """Load `group` and count one user more, until `_done`."""
        if not self._complete:
            self.begin()
        self._device.charge_layer_overhead()
        self._use(group)
        here = self._loaded[group]
        if not here.visible:
            try:
                here.show(self._placeholders, self._recorder)
            except BaseException:
                self._evict(group)  # its copy failed: the next user sends it again
                raise
        here.users += 1

    def _done(self, group: WeightGroup) -> None:
        here = self._loaded.get(group)
        if here is None or not here.let_go():
            return
        # resident groups too: fusing a LoRA between two calls writes to what modules have
        here.hide(self._placeholders)
        del here  # it would keep memory that is freed below
        self._used_up(group)
        if self._on_freed is not None:
            self._give_way(self._on_freed)

    def _give_way(self, make_way: Callable[[int], None]) -> None:
        """Free resident groups that are no longer needed in the last call, and call `make_way`."""
        self._leave(self._pool.lend(lambda group: self._order.over(group) and self._idle(group)))
        if self._order.looked_through:
            make_way(self._pool.lent)

    def set_aside(self) -> None:
        """Put the placeholders of source parameters without values into the modules."""
        self._placeholders.set_aside()

    def give_back(self, file_weights: FileBackedWeights | None = None) -> None:
        """Load source parameters without values, with changes by other code, or leave them to `file_weights`."""
        self._placeholders.give_back(file_weights)

    def clear(self) -> None:
        """Evict everything and put the source parameters into the modules, whatever state an interruption left."""
        for group in self._groups:
            if (here := self._loaded.get(group)) is not None:
                here.handle.cancel()
                here.hide(self._placeholders)
            self._placeholders.keep(group)
            if group.store.writable:
                group.show(self._placeholders[group], group.source_params)
        self._loaded, self._order, self._usual = {}, self._usual or self._order, None
        forget_casts()
        self._entered.clear()
        self._fetcher.forget()
        self._order.rewind()
        self._pool.clear()
        self._on_freed = None
        self.on_device = self._complete = False

    # sending

    def _send_if_room(self, group: WeightGroup) -> bool:
        if group in self._loaded:
            return True
        resident = group in self._resident
        place = self._pool.region_of(group) if resident else self._pool.lease(group)
        if place is None:
            return False
        after = None if place.lease is None else place.lease.after
        self._send(place, self._began if after is None else after)
        return True

    def _send_now(self, group: WeightGroup) -> None:
        self._recorder.loaded_on_demand(learning=not self._order.known)
        super()._send_now(group)

    def _send_beside(self, group: WeightGroup) -> None:
        self._send(LoadedGroup(group, self._pool.extra(group.size)), self._stream.mark())

    def _send(self, here: LoadedGroup, after: Any) -> None:
        group = here.group
        if group not in self._resident:
            self._device.charge_transfer_overhead()
        with self._recorder.uncounted():
            here.handle = group.store.send(self._stream, here.region, after)
        self._recorder.moved(bytes_in=group.size)
        here.users = 0
        self._loaded[group] = here

    def fetch(self, group: WeightGroup, index: int) -> torch.Tensor:
        """Return a copy of one weight, which is read while no module that uses it runs."""
        if (here := self._loaded.get(group)) is not None:
            self._recorder.waited(here.handle.wait_on_device())
            return here.copy_of(index)
        return self._fetcher.fetch(group, index)

    # memory

    def _install_placeholders(self) -> None:
        """Put placeholders for all weights into the modules, and allow allocation."""
        if self.on_device:
            return
        self.on_device = True
        for group in self._groups:
            if group.keep_up():
                self._placeholders.renew(group)
                if group.store.lock_refused:
                    self._recorder.note("page-locking was refused for weights that had been changed")
            group.show(group.source_params, self._placeholders[group])
        self._pool.open()

    def _take_memory(self) -> None:
        """Allocate memory for resident groups and the ring."""
        if self._complete:
            return
        self._install_placeholders()
        try:
            left = self._pool.take()
        except torch.OutOfMemoryError:
            self.clear()
            raise
        self._complete = True
        self._began = self._stream.mark()
        if left:
            self._leave(left)
            self._recorder.ran_out("out of memory before a component's first layer", sum(p.size for p in left))

    def evict_residents(self) -> int:
        """Evict some resident groups that are not in use, for good; return their bytes."""
        self._leave(left := self._pool.give_up(self._idle))
        if left:
            self._order.spoil()
        return sum(group.size for group in left)

    def _idle(self, group: WeightGroup) -> bool:
        return group not in self._loaded or not self._loaded[group].users

    def _leave(self, groups: Iterable[WeightGroup]) -> None:
        """Evict those of `groups` that are on the device, needed or not."""
        for group in groups:
            if group in self._loaded:
                self._evict(group)

    def _evict(self, group: WeightGroup) -> None:
        self._loaded[group].handle.cancel()
        self._release(group)

    def _release(self, group: WeightGroup) -> None:
        here = self._loaded.pop(group)
        here.hide(self._placeholders)
        forget_casts()
        if here.lease is not None:
            self._pool.give_back(here.lease, self._stream.mark())

    def _idle_in_ring(self) -> Iterator[WeightGroup]:
        return (group for group in self._loaded if self._idle(group) and group not in self._resident)
