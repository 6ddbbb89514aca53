"""Which weights are on the device when: components that stay, that come for their phase, that come by units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from torch import nn

from tightfit.apply.activations.ffn_chunking import inside_feed_forwards
from tightfit.apply.weights.call_order import CallOrder, Pass
from tightfit.apply.weights.file_weights import FileBackedWeights, StoreFactory
from tightfit.apply.weights.oom_retry import retry_blocks_on_oom, retry_on_oom
from tightfit.apply.weights.quantize import store_weights
from tightfit.apply.weights.quantized_tensor import StoredWeight
from tightfit.apply.weights.streamer import Streamer
from tightfit.apply.weights.tensor_loader import TensorLoader
from tightfit.apply.weights.weight_groups import WeightGroup, weight_groups_of
from tightfit.apply.weights.weight_store import HOST, Held, moved
from tightfit.devices.device import Device
from tightfit.devices.memory import trim_heap
from tightfit.measure.modules import find_blocks, inspect_component, layer_weights, weight_bytes, weight_tensors
from tightfit.measure.recorder import Recorder
from tightfit.plan.component_order import ALTERNATIONS
from tightfit.plan.layer_selection import resolve_streaming
from tightfit.schema.plan import ComponentPlan

__all__ = ["OffloadManager"]


class OffloadManager:
    """Keeps the weights of a pipeline's components where the plan wants them.

    A component that comes for its phase goes when another starts to work, unless the two alternate (a
    ControlNet and its UNet): those stay together from then on.
    """

    def __init__(self, device: Device, recorder: Recorder, file_weights: FileBackedWeights) -> None:
        self._device, self._file_weights = device, file_weights
        self._housing = StoreFactory(device, file_weights)
        self._elsewhere: set[str] = set()  # whose weights were not in host memory before
        self._held: Held = {}  # until all is in place
        self._recorder = recorder
        self._loaders: dict[str, TensorLoader] = {}
        self._streamers: dict[str, Streamer] = {}
        self._turns: Counter[frozenset[str]] = Counter()
        self._together: set[frozenset[str]] = set()
        self._last: str | None = None
        self._agenda = CallOrder()
        self._unused: Mapping[Pass, Sequence[str]] = {}  # parts that have no work, as far as that is known
        self._early: Mapping[Pass, int] = {}  # bytes that may come before their turn, where not all that find room do
        self._coming: Pass | None = None  # whose turn is next, and who comes already

    def place(self, name: str, module: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
        """Moves the weights of `module`, the component `name`, to where they are while nobody works.

        `undo` takes them back.
        """
        self._look_where(name, module)
        if plan.placement == "resident" and self._device.swaps_parameters:
            loader = TensorLoader(module, self._device, self._recorder)
            loader.load()
            undo.callback(loader.evict)
        elif plan.placement == "resident" or not self._device.separate:
            undo.callback(moved(module, self._device.torch_device, self._held))
            self._count(weight_bytes(module), undo)
        else:
            undo.callback(moved(module, HOST, self._held))

    def settled(self) -> None:
        """All is in place: what was there before goes."""
        self._held.clear()

    def _look_where(self, name: str, module: nn.Module) -> None:
        if any(tensor.device != HOST and not tensor.is_meta for tensor in weight_tensors(module)):
            self._elsewhere.add(name)

    def store(self, name: str, module: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
        """Puts weights of `module`, the component `name`, into eight bits in host memory.

        It comes before `place`, so that no device has to hold them as they were loaded. What will be read from the
        disk goes there at once, each weight as soon as it is stored.
        """
        if plan.storage == "as-loaded":
            return
        self._look_where(name, module)
        passing = layer_weights(module) if plan.offload_to == "disk" and plan.placement != "resident" else set()

        def aside(original: nn.Parameter, weight: StoredWeight) -> None:
            if id(original) in passing:
                self._housing.set_aside(weight)

        in_ram = self._device.separate
        undo.callback(store_weights(module, plan, self._file_weights, originals_in_ram=in_ram, aside=aside))
        trim_heap()

    def stream(self, name: str, module: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
        """Lets the weights of `module`, the component `name`, come and go as it works."""
        if plan.placement == "resident" or not (self._device.separate or plan.offload_to == "disk"):
            return
        component = inspect_component(name, module)
        if plan.placement == "stream":
            plan = resolve_streaming(component, plan)
        inside = inside_feed_forwards(module) if plan.ffn_chunk else {}
        unused = {method: parts for (whose, method), parts in self._unused.items() if whose == name}
        stores, weight_of = self._housing.stores(plan, undo), self._file_weights.weight_of
        groups = weight_groups_of(module, component, plan.granularity or "layer", stores, weight_of, inside, unused)
        self._housing.settle(module)
        if plan.pinned:
            self._lock(name, groups, undo)
        resident = {group.name for group in groups} if plan.placement == "offload" else plan.resident_layers or ()
        streamer = Streamer(groups, resident, plan.ring_buffer or 0, self._device, self._recorder)
        streamer.hook(undo.callback)
        self._streamers[name] = streamer
        if self._device.separate:
            retry_blocks_on_oom(find_blocks(module), lambda block: self.make_more_room(name, block), undo)
        if plan.offload_to == "disk":
            streamer.set_aside()
            undo.callback(self._give_back, name)
        if self._device.separate:
            self._loaders[name] = TensorLoader(module, self._device, self._recorder, without=streamer.owned)
        else:  # what is small is in RAM anyway, and what is large no more
            self._count(-sum(layer.bytes for layer in component.layers), undo)

    def _count(self, size: int, undo: ExitStack) -> None:
        """`size` bytes more are on the device until `undo`."""
        self._recorder.weights_changed(size)
        undo.callback(self._recorder.weights_changed, -size)

    def _give_back(self, name: str) -> None:
        """What `name` has on the disk it has in memory again; or there, where another plan follows."""
        goes_on = self._file_weights.resident and name not in self._elsewhere
        self._streamers[name].give_back(self._file_weights if goes_on else None)

    def _lock(self, name: str, groups: list[WeightGroup], undo: ExitStack) -> None:
        """Page-locks the masters, as far as the system lets us."""
        for count, group in enumerate(groups):
            if not group.store.lock_pages():
                self._recorder.note(f"{name}: page-locking was refused after {count} of {len(groups)} groups")
                return
            undo.callback(group.unlock_pages)  # by then it may have another home

    def enter(self, name: str) -> None:
        """The component `name` starts to work: those it does not share the device with go, and it comes."""
        self.make_room(name)
        self.bring(name)

    def make_room(self, name: str) -> None:
        """What `name` does not share the device with goes."""
        if self._last not in (None, name):
            self._take_turns(frozenset((name, self._last or "")))
        self._last = name
        for other in self._streamers:
            if not self._shared(name, other):
                self._evict(other)

    def expect(
        self,
        steps: int | None,
        passes: Sequence[Pass],
        unused: Mapping[Pass, Sequence[str]],
        early: Mapping[Pass, int],
    ) -> None:
        """A call that asks for `steps` steps will probably work through `passes`, with some parts `unused`.

        Of those in `early`, no more than so many bytes come before their turn.
        """
        self._agenda.expect(steps, passes)
        self._unused, self._early = unused, early

    def begin(self, steps: int | None) -> None:
        """A call begins that asks for `steps` steps (None: the usual number)."""
        if self._device.over(self._recorder.highest_rss):
            self._device.release_cache()  # of what was freed since the last call, or what loading left behind
        self._agenda.begin(steps)

    def end(self) -> int:
        """The call has come to its end; returns what `keep_within` does."""
        self._agenda.end()
        return self.keep_within(None)

    def bring(self, name: str, method: str = "forward") -> None:
        """The weights of `name` start to come, for a pass of `method`."""
        self._agenda.works(name, method)

        def come() -> None:
            if name in self._loaders:
                self._loaders[name].load()
            if name in self._streamers:
                self._streamers[name].begin(method, self._let_come if self._coming else None)

        after = self._agenda.next
        takes_over = after is not None and after[0] in self._streamers and not self._shared(name, after[0])
        self._coming = after if takes_over else None
        retry_on_oom(come, lambda: self.make_more_room(name, ""))()

    def _let_come(self, limit: int) -> None:
        """Of who works next, what fits into `limit` bytes starts to come."""
        if self._coming is not None:
            name, method = self._coming
            self._streamers[name].approach(limit, method, self._early.get(self._coming))

    def finish(self, name: str) -> None:
        """A pass of `name` has come to its end."""
        if name not in self._streamers:
            return
        self._streamers[name].end()
        if self._coming is not None:
            room = self._streamers[name].room
            self._evict(name)
            self._let_come(room)

    def _shared(self, one: str, other: str) -> bool:
        """Whether the two are on the device together."""
        return one == other or frozenset((one, other)) in self._together

    def make_more_room(self, name: str, where: str) -> bool:
        """Out of memory while `name` was at work: some of what stays gives up its place; whether there was any."""
        for give_up in (self._send_back, *self._sheds(name)):
            given_up = give_up()
            if given_up:
                self._device.release_cache()
                self._recorder.ran_out(f"out of memory in {name}.{where}".rstrip("."), given_up)
                return True
        return False

    def keep_within(self, name: str | None) -> int:
        """`name` is about to work: where the process held more RAM than it may, some of what stays gives up its place.

        A card's allocator says by itself when there is no more; a computer's memory does not. Returns how many bytes
        the process held where what could go was not enough, else 0.
        """
        held = 0

        def highest() -> int:
            nonlocal held
            held = self._recorder.highest_rss()
            return held

        beyond = self._device.over(highest)
        for shed in self._sheds(name) if beyond else ():
            while beyond > 0 and (given_up := shed()):
                self._recorder.ran_out("this process held more RAM than it may", given_up)
                beyond -= given_up
        if beyond:
            self._device.release_cache()
        return held if beyond > 0 else 0

    def _sheds(self, name: str | None) -> list[Callable[[], int]]:
        first = [self._streamers[name]] if name in self._streamers else []
        return [streamer.shed for streamer in (*first, *self._streamers.values())]

    def _send_back(self) -> int:
        """Who came before its turn goes, and waits for it; how many bytes that gives."""
        early, self._coming = self._coming, None
        if early is None:
            return 0
        room = self._streamers[early[0]].room
        self._evict(early[0])
        return room

    def _evict(self, name: str) -> None:
        if self._streamers[name].device_bytes:
            self._streamers[name].clear()
        if name in self._loaders and self._loaders[name].is_loaded:
            self._loaders[name].evict()

    def _take_turns(self, pair: frozenset[str]) -> None:
        self._turns[pair] += 1
        if self._turns[pair] > ALTERNATIONS and pair not in self._together:
            self._together.add(pair)
            self._recorder.note(f"{' and '.join(sorted(pair))} take turns: they stay on the device together")

    def dismiss(self, name: str) -> None:
        """The weights of `name` go, whoever works next: somebody is about to change them all."""
        if name in self._streamers:
            self._evict(name)

    def rest(self) -> None:
        """What is small goes, so that at the next call the modules are looked through for new weights."""
        for loader in self._loaders.values():
            if loader.is_loaded:
                loader.evict()

    def clear(self) -> None:
        """Everything that came goes."""
        for name in self._streamers:
            self._evict(name)
        self._turns.clear()
        self._last = None
