"""Cost of a component under its plan on a device: bytes of its weights there, and seconds of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from tightfit.catalog.cuda import PAGEABLE
from tightfit.plan.backward_cache import backward_seconds
from tightfit.plan.compute_segments import ComputeSegment
from tightfit.plan.cost_model import CostModel
from tightfit.plan.eight_bits import widened_bytes
from tightfit.plan.layer_selection import resolve_streaming, small_tensor_bytes, weight_group_sizes
from tightfit.plan.strip_times import work_in_strips
from tightfit.plan.timeline import HostOverheads, TransferSimulator
from tightfit.schema.footprint import Component, ComponentCall, StripProfile
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Granularity
from tightfit.schema.stores import NO_RATES, StoreRates

__all__ = ["SEGMENT", "ComponentCost", "always", "backward_bytes", "chunks", "device_bytes_of", "round_up"]

Group = TypeVar("Group")

SEGMENT = 2 * 2**20  # bytes: the granularity at which an allocator reserves device memory
CHUNK = 128 * 2**20  # bytes: the largest allocation that the engine makes for several resident weight groups
SIMULATED_CALLS = 4  # simulated calls, after which each further one is taken to last the mean of the last two, …
TOLERANCE = 1e-6  # … or 3, if the last two differ by no more than this fraction


class ComponentCost:
    """Cost of `component` under `plan` on `device`.

    Times are from `cost_model`; weights are loaded at the rate of the link, or of their store where that is slower.
    Raises PlanError if the plan streams and cannot be resolved.
    """

    def __init__(
        self,
        component: Component,
        plan: ComponentPlan,
        device: Accelerator,
        cost_model: CostModel,
        store_rates: StoreRates = NO_RATES,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """`seconds` is the compute time of each of its layers, if known."""
        self.component, self.is_resident = component, plan.placement == "resident"
        self.plan = resolve_streaming(component, plan, seconds) if plan.placement == "stream" else plan
        self._device, self._cost_model = device, cost_model
        self._sizes = {} if self.is_resident else weight_group_sizes(component, self._granularity, self.plan)
        self._resident = set(self._sizes if plan.placement == "offload" else self.plan.resident_layers or ())
        self._small_bytes = small_tensor_bytes(component)
        link = device.link_rate or float("inf")
        self.rate = min(link, store_rates.get(plan.offload_to, link))  # bytes per second
        self._ranks = device.ranks_sharing_weights
        self.launch = device.launch_overhead  # host seconds for each kernel or copy
        self._overheads = HostOverheads(device.streamed_overhead, device.resident_overhead)
        self._flow: TransferSimulator | None = None
        self.idle = 0.0  # seconds at the end of its last call in which the link has nothing to load for it

    @property
    def _granularity(self) -> Granularity:
        return self.plan.granularity or "layer"

    @property
    def always(self) -> int:
        """Bytes on the device during the whole pipeline call."""
        return always(self.component, self._device, remains=self.is_resident)

    @property
    def ram_bytes(self) -> int:
        """Bytes of host memory that this process counts for its weights."""
        return 0 if self.is_resident else self.plan.store.ram_bytes(self.component.bytes, self._ranks)

    @cached_property
    def widened(self) -> int:
        """Most bytes of widened weights, beside the stored ones, while a layer stored in eight bits runs."""
        return widened_bytes(self.component, self.plan)

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is host memory."""
        return self._device.is_cpu

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes loaded onto the device while it runs, in addition to `always`."""
        if self.is_resident:
            return 0
        resident = (size for name, size in self._sizes.items() if name in self._resident)
        return device_bytes_of(resident, self.plan.ring_buffer or 0) + (
            0 if self._device.is_cpu else round_up(self._small_bytes)
        )

    def prefetchable_bytes(self, seconds: float) -> int:
        """Return how many of its bytes can be loaded in `seconds`; 0 if no more than its largest weight group."""
        size = int(seconds * self.rate)
        return size if size > max(self._sizes.values(), default=0) else 0

    def begin_load(self, now: float) -> float:
        """Begin to load it at time `now`; return when its small tensors are loaded."""
        self._flow = None
        if self._device.is_cpu:
            return now
        launching = self.component.small_tensors * self.launch
        return now + launching + self._small_bytes / (self.rate * PAGEABLE)  # they are not page-locked

    def work(
        self,
        call: ComponentCall,
        runs: int,
        now: float,
        strip_profile: StripProfile | None = None,
        following: ComponentCall | None = None,
    ) -> float:
        """Return when `runs` consecutive calls end that begin at time `now`, each with `strip_profile`.

        `following` is the component's call after these.
        """
        if self.is_resident or (self._flow is not None and self._flow.complete):
            self.idle = self._cost_model.seconds_without_weights(
                call, strip_profile, None if self.is_resident else self._granularity
            )
            return now + runs * self.idle
        if call.backward_from is not None:
            self.idle = 0.0
            return now + runs * self._differentiated_seconds(call)
        segments = self._cost_model.segments(call, self._granularity)
        if self._flow is None:
            used = {segment.group for segment in segments}
            guess = [name for name in self._cost_model.expected(self._granularity) if name in used]
            ring, overheads = self.plan.ring_buffer or 0, self._overheads
            self._flow = TransferSimulator(
                guess, self._sizes, self._resident, ring, self.rate, self.launch, now, overheads
            )
        self._flow.now = max(self._flow.now, now)
        left_out, after = self._left_out(call, segments)
        again, then = self._foretold(call), self._foretold(following)
        foretold = self._cost_model.foretold(call, self._granularity)
        seconds: list[float] = []
        while len(seconds) < min(runs, SIMULATED_CALLS) and not self._flow.complete and not _steady(seconds):
            if strip_profile is None:
                last = len(seconds) + 1 == runs
                left = then if last else again
                seconds.append(self._flow.work(segments, left_out=left_out, after=after, then=left, foretold=foretold))
            else:
                seconds.append(
                    work_in_strips(
                        self._cost_model.timings(strip_profile, call.time_scale, self._granularity),
                        strip_profile.batch_items,
                        self._flow,
                    )
                )
        later = (
            self._cost_model.seconds_without_weights(call, strip_profile, self._granularity)
            if self._flow.complete
            else sum(seconds[-2:]) / 2
        )
        self.idle = later if self._flow.complete and len(seconds) < runs else self._flow.idle
        return now + sum(seconds) + later * (runs - len(seconds))

    def _left_out(self, call: ComponentCall, segments: Sequence[ComputeSegment]) -> tuple[frozenset[str], int]:
        """Return the weight groups that a step cache leaves out of a call, and after how many segments it is known."""
        if call.left_out_from is None:
            return frozenset(), 0
        used = {segment.group for segment in segments}
        return frozenset(self._sizes.keys() - used), self._cost_model.decided_after(call, self._granularity)

    def _foretold(self, call: ComponentCall | None) -> frozenset[str]:
        """Return the weight groups that `call` leaves out, if that is known before it begins."""
        if call is None or call.component != self.component.name or call.left_out_from != 0:
            return frozenset()
        return self._left_out(call, self._cost_model.segments(call, self._granularity))[0]

    def _differentiated_seconds(self, call: ComponentCall) -> float:
        """Return the seconds of a call and its backward pass. Each begins without weights, and none stays resident."""
        whole = sum(self._sizes[name] for name in self._resident) + (self.plan.ring_buffer or 0)
        forward, backward = self._cost_model.halves(call, self._granularity)
        order = [segment.group for segment in forward if segment.group]
        seconds = TransferSimulator(
            order, self._sizes, (), max(whole, *self._sizes.values()), self.rate, self.launch, 0.0, self._overheads
        ).work(forward)
        most = min(backward_bytes(self.component), whole)
        return seconds + backward_seconds(backward, self._sizes, most, self.rate, self.launch, self._overheads)


def _steady(seconds: Sequence[float]) -> bool:
    """Whether the last two calls took equally long."""
    return len(seconds) > 2 and abs(seconds[-1] - seconds[-2]) <= TOLERANCE * seconds[-1]


def backward_bytes(component: Component) -> int:
    """Return the bytes of weights that a backward pass needs: of the block that runs, and of the next one."""
    return 2 * max((block.bytes for block in component.blocks or component.layers), default=0)


def chunks(groups: Iterable[Group], size: Callable[[Group], int]) -> Iterator[list[Group]]:
    """Split resident weight groups into those that share one allocation: up to CHUNK bytes, or a single group."""
    chunk: list[Group] = []
    whole = 0
    for group in groups:
        if chunk and whole + size(group) > CHUNK:
            yield chunk
            chunk, whole = [], 0
        chunk.append(group)
        whole += size(group)
    if chunk:
        yield chunk


def always(component: Component, device: Accelerator, *, remains: bool) -> int:
    """Return the bytes on `device` during the whole call: all weights if it `remains`, else on a CPU the small ones.

    With the weights are the gradients that a backward pass leaves.
    """
    if remains:
        return (component.allocator_bytes or component.bytes) + component.gradient_bytes
    return round_up(small_tensor_bytes(component)) if device.is_cpu else 0


def device_bytes_of(resident: Iterable[int], ring: int) -> int:
    """Return the device bytes of resident weight groups and of the ring buffer, rounded up to segments."""
    return sum(round_up(sum(chunk)) for chunk in chunks(resident, int)) + round_up(ring)


def round_up(size: int, multiple: int = SEGMENT) -> int:
    """Round `size` up to a multiple of `multiple` bytes."""
    return -(-size // multiple) * multiple
