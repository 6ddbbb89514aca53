"""Which weights are on the device when: those of resident, offloaded and streamed components."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import nn

from tightfit.apply.activations.ffn_chunking import inside_feed_forwards
from tightfit.apply.weights.backward_passes import BackwardPasses
from tightfit.apply.weights.call_order import CallKey, CallOrder
from tightfit.apply.weights.differentiable_streamer import DifferentiableStreamer
from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.network_parts import blocks_of, inspect_part, network_of
from tightfit.apply.weights.oom_retry import retry_blocks_on_oom, retry_on_oom
from tightfit.apply.weights.placed_groups import PlacedGroups
from tightfit.apply.weights.quantize import store_weights
from tightfit.apply.weights.quantized_tensor import StoredWeight
from tightfit.apply.weights.store_factory import StoreFactory
from tightfit.apply.weights.tensor_loader import TensorLoader
from tightfit.apply.weights.weight_groups import WeightGroup, weight_groups_of
from tightfit.apply.weights.weight_store import HOST, Held, moved
from tightfit.devices.device import Device
from tightfit.devices.memory import trim_heap
from tightfit.measure.modules import layer_weights, weight_bytes, weight_tensors
from tightfit.measure.recorder import Recorder
from tightfit.plan.component_cost import backward_bytes
from tightfit.plan.component_order import CoResidencyTracker
from tightfit.plan.layer_selection import resolve_streaming
from tightfit.schema.plan import ComponentPlan

__all__ = ["WeightOffloader"]


class WeightOffloader:
    """Keeps the weights of a pipeline's components where the plan wants them.

    One loaded for its phase is evicted when another starts to run, unless the two alternate (`CoResidencyTracker`).
    """

    def __init__(self, device: Device, recorder: Recorder, file_weights: FileBackedWeights, *, shares: bool) -> None:
        """With `shares`, weights in host memory may be shared with other processes, until `finish_placing`."""
        self._device, self._file_weights = device, file_weights
        self._store_factory = StoreFactory(device, file_weights)
        self._elsewhere: set[str] = set()  # components whose weights were not in host memory before
        self.placed = PlacedGroups(recorder, waits=shares)
        self._held: Held = {}  # original tensors, until all weights are placed
        self._recorder = recorder
        self._loaders: dict[str, TensorLoader] = {}
        self._streamers: dict[str, DifferentiableStreamer] = {}
        self.backward = BackwardPasses(device, self._streamers, self._loaders, self._evict)
        self._tracker = CoResidencyTracker()
        self._call_order = CallOrder()
        self._unused: Mapping[CallKey, Sequence[str]] = {}  # paths of blocks that do not run, as far as known
        self._early: Mapping[CallKey, int] = {}  # most bytes to prefetch, where limited
        self._next_call: CallKey | None = None  # the next component call, whose weights are prefetched

    def place(self, name: str, module: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
        """Move the weights of `module`, the component `name`, to where they are while no component runs.

        `undo` moves them back.
        """
        self._look_where(name, module)
        if plan.placement == "resident" and self._device.swaps_parameters:
            loader = TensorLoader(module, self._device, self._recorder)
            loader.load()
            undo.callback(loader.evict, compare=True)
        elif plan.placement == "resident" or not self._device.separate:
            undo.callback(moved(module, self._device.torch_device, self._held))
            self._count(weight_bytes(module), undo)
        else:
            undo.callback(moved(module, HOST, self._held))

    def discard_originals(self) -> None:
        """Discard the original tensors: all weights are placed."""
        self._held.clear()

    def _look_where(self, name: str, module: nn.Module) -> None:
        if any(tensor.device != HOST and not tensor.is_meta for tensor in weight_tensors(module)):
            self._elsewhere.add(name)

    def store(self, name: str, module: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
        """Store weights of `module`, the component `name`, in eight bits in host memory.

        Called before `place`, so that no device has to hold them as they were loaded. Weights that will be read from
        the disk are written to it at once, each as soon as it is converted.
        """
        if plan.storage == "as-loaded":
            return
        self._look_where(name, module)
        passing = layer_weights(module) if plan.store.in_files and plan.placement != "resident" else set()

        def aside(original: nn.Parameter, weight: StoredWeight) -> None:
            if id(original) in passing:
                self._store_factory.set_aside(weight)

        in_ram = self._device.separate
        undo.callback(store_weights(module, plan, self._file_weights, originals_in_ram=in_ram, aside=aside))
        trim_heap()

    def stream(self, name: str, module: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
        """Load and evict the weights of `module`, the component `name` or a part of it (PartView), as it runs."""
        if not plan.moves(separate=self._device.separate):
            return
        network, component = network_of(module), inspect_part(name, module)
        if plan.placement == "stream":
            plan = resolve_streaming(component, plan)
        inside = inside_feed_forwards(network) if plan.ffn_chunk else {}
        unused = {method: parts for (whose, method), parts in self._unused.items() if whose == name}
        stores, weight_of = self._store_factory.stores(plan, undo), self._file_weights.weight_of
        groups = weight_groups_of(network, component, plan.granularity or "layer", stores, weight_of, inside, unused)
        self._store_factory.finish(module)
        undo.callback(_release, groups)
        self.placed.add(name, groups, undo, pinned=bool(plan.pinned))
        resident = {group.name for group in groups} if plan.placement == "offload" else plan.resident_layers or ()
        begins_backward, ring = partial(self.backward.need, name), plan.ring_buffer or 0
        most = backward_bytes(component)
        streamer = DifferentiableStreamer(groups, resident, ring, self._device, self._recorder, most, begins_backward)
        streamer.hook(undo.callback)
        undo.callback(streamer.close)
        self._streamers[name] = streamer
        if self._device.separate:
            retry_blocks_on_oom(blocks_of(module), lambda block: self.free_memory(name, block), undo)
        streamer.set_aside()
        undo.callback(self._give_back, name)
        if self._device.separate:
            self._loaders[name] = TensorLoader(module, self._device, self._recorder, without=streamer.owned)
        else:  # small tensors are in RAM anyway, layers no longer
            self._count(-sum(layer.bytes for layer in component.layers), undo)

    def _count(self, size: int, undo: ExitStack) -> None:
        """Count `size` more bytes of weights on the device until `undo`."""
        self._recorder.weights_changed(size)
        undo.callback(self._recorder.weights_changed, -size)

    def _give_back(self, name: str) -> None:
        """Load weights of `name` that have no values into memory, or leave them in files where another plan follows."""
        if name in self._loaders:
            self._loaders[name].evict()  # also what other code put on the device since the last call
        goes_on = self._file_weights.keep_in_files and name not in self._elsewhere
        self._streamers[name].give_back(self._file_weights if goes_on else None)

    def finish_placing(self) -> None:
        """Finish placing weights that may have been shared with other processes: nothing is on the device."""
        for streamer in self._streamers.values():
            streamer.set_aside()
        self.placed.lock()

    def enter(self, name: str) -> None:
        """Load the component `name`, which starts to run, after evicting those it does not share the device with."""
        self.evict_others(name)
        self.load(name)

    def evict_others(self, name: str) -> None:
        """Evict the components that `name` does not share the device with."""
        known = len(self._tracker.pairs)
        self._tracker.record_run(name)
        for pair in self._tracker.pairs[known:]:
            self._recorder.note(f"{' and '.join(sorted(pair))} take turns: they stay on the device together")
        for other in self._streamers:
            if not self._tracker.share(name, other):
                self._evict(other)

    def expect(
        self,
        steps: int | None,
        passes: Sequence[CallKey],
        unused: Mapping[CallKey, Sequence[str]],
        early: Mapping[CallKey, int],
    ) -> None:
        """Expect `passes` in calls with `steps` steps (None: the default number), with some blocks `unused`.

        `early`: the most bytes to prefetch for a component call, where limited.
        """
        self._call_order.expect(steps, passes)
        self._unused, self._early = unused, early

    def leave_out(self, name: str, modules: Iterable[nn.Module], then: Iterable[nn.Module] = ()) -> int:
        """Load nothing in `modules` any more in this call of `name`, nor `then` in the next; return bytes in vain."""
        return self._streamers[name].without(modules, then) if name in self._streamers else 0

    def begin(self, steps: int | None) -> None:
        """Begin a call with `steps` steps (None: the default number)."""
        if self._device.excess_bytes(self._recorder.highest_rss):
            self._device.release_cache()  # memory freed since the last call, or by loading
        self._call_order.begin(steps)

    def end(self) -> int:
        """End the call; return what `keep_within` does."""
        self._call_order.end()
        return self.keep_within(None)

    def load(self, name: str, method: str = "forward") -> None:
        """Start to load the weights of `name`, for a call of `method`."""
        self.backward.finish()
        self._call_order.begin_call(name, method)

        def come() -> None:
            if name in self._loaders:
                self._loaders[name].load()
            if name in self._streamers:
                self._streamers[name].begin(method, self._let_come if self._next_call else None)

        after = self._call_order.next
        takes_over = after is not None and after[0] in self._streamers and not self._tracker.share(name, after[0])
        self._next_call = after if takes_over else None
        retry_on_oom(come, lambda: self.free_memory(name, ""))()

    def _let_come(self, limit: int) -> None:
        """Prefetch weights of the component that runs next, into at most `limit` bytes."""
        if self._next_call is not None:
            name, method = self._next_call
            self._streamers[name].prefetch(limit, method, self._early.get(self._next_call))

    def finish(self, name: str) -> None:
        """End a call of `name`; if another component is next, evict this one and prefetch that."""
        if name not in self._streamers:
            return
        self._streamers[name].end()
        if self._next_call is not None:
            self._let_come(self._evict(name))

    def free_memory(self, name: str, where: str) -> bool:
        """Evict some weights after `name` ran out of memory, in the block `where`; return whether there were any."""
        for give_up in (self._send_back, *self._evictions(name)):
            given_up = give_up()
            if given_up:
                self._device.release_cache()
                self._recorder.ran_out(f"out of memory in {name}.{where}".rstrip("."), given_up)
                return True
        return False

    def keep_within(self, name: str | None) -> int:
        """Evict some resident weights if the process held more RAM than allowed; `name` is about to run (None: none).

        A card's allocator raises an error when memory runs out; RAM does not. Return the bytes that the process held
        where evicting was not enough, else 0.
        """
        held = 0

        def highest() -> int:
            nonlocal held
            held = self._recorder.highest_rss()
            return held

        beyond = self._device.excess_bytes(highest)
        for evict_residents in self._evictions(name) if beyond else ():
            while beyond > 0 and (given_up := evict_residents()):
                self._recorder.ran_out("this process held more RAM than it may", given_up)
                beyond -= given_up
        if beyond:
            self._device.release_cache()
        return held if beyond > 0 else 0

    def _evictions(self, name: str | None) -> list[Callable[[], int]]:
        first = [self._streamers[name]] if name in self._streamers else []
        return [streamer.evict_residents for streamer in (*first, *self._streamers.values())]

    def _send_back(self) -> int:
        """Evict the component that was prefetched; return the bytes freed."""
        early, self._next_call = self._next_call, None
        return 0 if early is None else self._evict(early[0])

    def _evict(self, name: str) -> int:
        """Evict the component `name`; return the bytes freed."""
        device_bytes = self._streamers[name].device_bytes
        if self._streamers[name].on_device:
            self._streamers[name].clear()
        if name in self._loaders and self._loaders[name].is_loaded:
            self._loaders[name].evict()
        return device_bytes

    def dismiss(self, name: str) -> None:
        """Evict the weights of `name`, and all that other code put beside them: it is about to change them all."""
        if name in self._streamers:
            self._evict(name)
        if name in self._loaders:
            self._loaders[name].evict()

    def rest(self) -> None:
        """Evict small tensors, so that the next call searches the modules for new ones; other weights stay loaded."""
        for loader in self._loaders.values():
            if loader.is_loaded:
                loader.evict()
        for streamer in self._streamers.values():
            streamer.rest()

    def clear(self) -> None:
        """Evict everything that was loaded."""
        for name in self._streamers:
            self._evict(name)
        self._tracker.begin_call()


def _release(groups: Sequence[WeightGroup]) -> None:
    """Let go of weights that another plan, or none, has by now: references in cycles would keep them for long."""
    for group in groups:
        group.store.release()
