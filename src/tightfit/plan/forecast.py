"""A footprint under a plan, on a machine's device → how long each phase takes, and how many bytes it needs there.

What a phase needs are the weights that are there meanwhile and the room that its activations want of an allocator
whose segments can grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from tightfit.catalog.cuda import workspace_bytes
from tightfit.plan.guests import Guests
from tightfit.plan.options import variant_of
from tightfit.plan.pace import Pace, alone, stretch_of
from tightfit.plan.parts import SEGMENT, Part, up
from tightfit.plan.shares import share_of
from tightfit.plan.strips import more_seconds
from tightfit.records import Accelerator, Footprint, Phase, PhaseForecast, Plan, VaePlan, Way

__all__ = [
    "Told",
    "forecast",
    "most_weights",
    "needed_bytes",
    "play",
    "play_together",
    "together",
    "way_of",
]

PERCENT, MARGIN = 1, 32 * 2**20  # by which a peak may be higher than its parts say …
MARGIN_CPU = 128 * 2**20  # … where libraries load code and keep buffers in the same memory


class Told(NamedTuple):
    """What a phase takes."""

    name: str
    seconds: float
    weights: int  # bytes that are there of them
    room: int  # bytes that an allocator wants for activations

    def peak(self, device: Accelerator) -> int:
        """What an allocator takes of `device` for both, with the margin."""
        return needed_bytes(self.weights, self.room, device)


def forecast(
    footprint: Footprint, plan: Plan, device: Accelerator, disk_rate: float | None = None
) -> tuple[PhaseForecast, ...]:
    """What the first call under `plan` will be like on `device`, phase by phase."""
    told = play(footprint, plan, device, disk_rate)
    return tuple(PhaseForecast(name=t.name, seconds=t.seconds, peak_bytes=t.peak(device)) for t in told)


def play(footprint: Footprint, plan: Plan, device: Accelerator, disk_rate: float | None = None) -> tuple[Told, ...]:
    """The same, before the margin is added."""
    footprint = footprint.varied(variant_of(footprint, plan))
    call = _Call(footprint, plan, device, disk_rate)
    return tuple(call.phase(phase) for phase in footprint.phases)


def together(
    footprint: Footprint, plan: Plan, devices: Mapping[str, Accelerator], disk_rate: float | None = None
) -> tuple[PhaseForecast, ...]:
    """The same where components compute on several `devices`, by name."""
    told = play_together(footprint, plan, devices, disk_rate)
    return tuple(_joined(plan.device, phases, devices) for phases in told)


def play_together(
    footprint: Footprint, plan: Plan, devices: Mapping[str, Accelerator], disk_rate: float | None = None
) -> list[dict[str, Told]]:
    """Phase by phase, what each of a plan's devices does, by name, before the margin is added."""
    footprint = footprint.varied(variant_of(footprint, plan))
    names = {name: {c.name for c in footprint.components if plan.device_of(c.name) == name} for name in plan.devices}
    shares = {name: share_of(footprint, names[name], hosts=name == plan.device) for name in names}
    told = [play(shares[name], plan, devices[name], disk_rate) for name in names]
    return [dict(zip(names, phases, strict=True)) for phases in zip(*told, strict=True)]


def _joined(host: str, told: Mapping[str, Told], devices: Mapping[str, Accelerator]) -> PhaseForecast:
    peaks = {name: each.peak(devices[name]) for name, each in told.items() if name == host or each.weights or each.room}
    seconds = sum(each.seconds for each in told.values())
    return PhaseForecast(name=told[host].name, seconds=seconds, peak_bytes=peaks.pop(host), elsewhere=peaks)


def needed_bytes(weights: int, room: int, device: Accelerator) -> int:
    """What an allocator takes of `device` for both, with the margin."""
    whole = weights + room + _workspace(device)
    return up(whole * (100 + PERCENT) // 100 + _margin(device))


def most_weights(size: int, room: int, device: Accelerator) -> int:
    """As many as there can be beside `room` for activations within `size` bytes, by `needed_bytes`."""
    left = size // SEGMENT * SEGMENT - _margin(device)
    return ((left + 1) * 100 - 1) // (100 + PERCENT) - room - _workspace(device)


def way_of(phase: Phase, vae: VaePlan) -> Way | None:
    """The way in which `vae` has the passes of `phase` done; None: as they were measured."""
    return next((way for way in phase.ways if (way.strips, way.maps) == (vae.strips, vae.maps)), None)


def _margin(device: Accelerator) -> int:
    return MARGIN_CPU if device.is_cpu else MARGIN


def _workspace(device: Accelerator) -> int:
    return 0 if device.is_cpu else workspace_bytes(device.compute_capability)


class _Call:
    """One call, as it goes on."""

    def __init__(self, footprint: Footprint, plan: Plan, device: Accelerator, disk_rate: float | None) -> None:
        self._device, self._vae = device, plan.vae
        self._parts = {
            c.name: Part(c, plan.components[c.name], device, Pace(c, device), disk_rate) for c in footprint.components
        }
        self._guests = Guests()
        self._now = 0.0

    def phase(self, phase: Phase) -> Told:
        began, weights = self._now, 0 if phase.order else self._there
        for index, group in itertools.groupby(phase.order):
            done = phase.passes[index]
            part = self._parts[done.component]
            if self._guests.works(done.component) and not part.remains:
                self._now = part.come(self._now)
            weights = max(weights, self._there)
            self._now = part.work(done, len(list(group)), self._now)
        way = way_of(phase, self._vae)
        self._now += phase.pace * alone([stretch_of(phase.between, self._device)])
        self._now += more_seconds(phase, way, self._device)
        weights += sum(part.always for part in self._parts.values())
        return Told(phase.name, self._now - began, weights, way.room if way else phase.room)

    @property
    def _there(self) -> int:
        """Bytes of weights on the device, of what comes and goes."""
        return sum(self._parts[name].comes for name in self._guests.aboard)
