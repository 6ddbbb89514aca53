"""A component under its plan, on a device: what its weights take there, and how long its passes last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from tightfit.catalog.cuda import PAGEABLE
from tightfit.plan.cost_model import CostModel, work_in_strips
from tightfit.plan.eight_bits import widened_bytes
from tightfit.plan.layer_selection import resolve_streaming, small_tensor_bytes, weight_group_sizes
from tightfit.plan.timeline import HostOverheads, TransferSimulator
from tightfit.schema.footprint import Component, ComponentCall, StripProfile
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Granularity

__all__ = ["SEGMENT", "ComponentCost", "always", "chunks", "taken", "up"]

Parcel = TypeVar("Parcel")

SEGMENT = 2 * 2**20  # bytes: what an allocator takes of a card at a time
CHUNK = 128 * 2**20  # bytes in which the engine takes room for what stays
KNOWN = 4  # passes after which the next are taken to be like the last two, …
ALIKE = 1e-6  # … or three, if these took as long up to so much of it


class ComponentCost:
    """A component that follows `plan` on `device`, timed by `cost_model`; disks read `disk_rate` bytes a second."""

    def __init__(
        self,
        component: Component,
        plan: ComponentPlan,
        device: Accelerator,
        time_scale: CostModel,
        disk_rate: float | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """`seconds` is how long each of its leaves is at work, where that is known."""
        self.component, self.remains = component, plan.placement == "resident"
        self.plan = resolve_streaming(component, plan, seconds) if plan.placement == "stream" else plan
        self._device, self._cost_model = device, time_scale
        self._sizes = {} if self.remains else weight_group_sizes(component, self._granularity, self.plan)
        self._resident = set(self._sizes if plan.placement == "offload" else self.plan.resident_layers or ())
        self._small_bytes = small_tensor_bytes(component)
        link = device.link_rate or float("inf")
        self.rate = min(link, disk_rate or link) if plan.offload_to == "disk" else link  # bytes a second from its home
        self.launch = device.launch_overhead  # seconds of the host for each piece of work
        self._overheads = HostOverheads(device.streamed_overhead, device.resident_overhead)
        self._flow: TransferSimulator | None = None
        self.idle = 0.0  # seconds at the end of its last pass for which its link has nothing to bring for it

    @property
    def _granularity(self) -> Granularity:
        return self.plan.granularity or "layer"

    @property
    def always(self) -> int:
        """Bytes on the device all along."""
        return always(self.component, self._device, remains=self.remains)

    @cached_property
    def widened(self) -> int:
        """Bytes beside its weights while a layer works that is stored in eight bits."""
        return widened_bytes(self.component, self.plan)

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is the host's."""
        return self._device.is_cpu

    @cached_property
    def passing(self) -> dict[str, int]:
        """What passes through its ring, with its bytes."""
        return {name: size for name, size in self._sizes.items() if name not in self._resident}

    @property
    def room(self) -> int:
        """Bytes that what stays and the ring have together."""
        return sum(self._sizes.values()) - sum(self.passing.values()) + (self.plan.ring_buffer or 0)

    @cached_property
    def comes(self) -> int:
        """Bytes more while it works."""
        if self.remains:
            return 0
        resident = (size for name, size in self._sizes.items() if name in self._resident)
        return taken(resident, self.plan.ring_buffer or 0) + (0 if self._device.is_cpu else up(self._small_bytes))

    def early(self, seconds: float) -> int:
        """Bytes of it that can come in so long; none where that is no more than the largest that moves together."""
        size = int(seconds * self.rate)
        return size if size > max(self._sizes.values(), default=0) else 0

    def come(self, now: float) -> float:
        """It comes `now`; when what is small is there."""
        self._flow = None
        if self._device.is_cpu:
            return now
        launching = self.component.small_tensor_bytes * self.launch
        return now + launching + self._small_bytes / (self.rate * PAGEABLE)  # it is not page-locked

    def work(self, done: ComponentCall, runs: int, now: float, way: StripProfile | None = None) -> float:
        """When `runs` passes are done that begin `now`, one after another, each in the same `way`."""
        if self.remains or (self._flow is not None and self._flow.complete):
            self.idle = self._cost_model.seconds_without_weights(done, way, None if self.remains else self._granularity)
            return now + runs * self.idle
        segments = self._cost_model.segments(done, self._granularity)
        if self._flow is None:
            used = {segment.group for segment in segments}
            guess = [name for name in self._cost_model.expected(self._granularity) if name in used]
            ring, overheads = self.plan.ring_buffer or 0, self._overheads
            self._flow = TransferSimulator(
                guess, self._sizes, self._resident, ring, self.rate, self.launch, now, overheads
            )
        self._flow.now = max(self._flow.now, now)
        seconds: list[float] = []
        while len(seconds) < min(runs, KNOWN) and not self._flow.complete and not _steady(seconds):
            if way is None:
                seconds.append(self._flow.work(segments))
            else:
                seconds.append(
                    work_in_strips(
                        self._cost_model.timings(way, done.time_scale, self._granularity), way.batch_items, self._flow
                    )
                )
        later = (
            self._cost_model.seconds_without_weights(done, way, self._granularity)
            if self._flow.complete
            else sum(seconds[-2:]) / 2
        )
        self.idle = later if self._flow.complete and len(seconds) < runs else self._flow.idle
        return now + sum(seconds) + later * (runs - len(seconds))


def _steady(seconds: Sequence[float]) -> bool:
    """Whether the last two passes took as long."""
    return len(seconds) > 2 and abs(seconds[-1] - seconds[-2]) <= ALIKE * seconds[-1]


def chunks(groups: Iterable[Parcel], size: Callable[[Parcel], int]) -> Iterator[list[Parcel]]:
    """What is taken, and given up, together of what stays: up to CHUNK bytes."""
    chunk: list[Parcel] = []
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
    """Bytes that are on `device` all along if it `remains`, or comes and goes. On a CPU what is small does not."""
    if remains:
        return component.allocator_bytes or component.bytes
    return up(small_tensor_bytes(component)) if device.is_cpu else 0


def taken(resident: Iterable[int], ring: int) -> int:
    """Bytes of a device for what stays, and for the ring."""
    return sum(up(sum(chunk)) for chunk in chunks(resident, int)) + up(ring)


def up(size: int, multiple: int = SEGMENT) -> int:
    return -(-size // multiple) * multiple
