"""A parcel's weights in device memory, and when modules see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.apply.weights.absences import Absences, versions_of
from tightfit.apply.weights.parcels import Parcel
from tightfit.apply.weights.rooms import Rooms
from tightfit.devices.lane import Arrival
from tightfit.measure.recorder import Recorder
from tightfit.plan.ring import Lease

__all__ = ["Presence"]


@dataclass(eq=False)
class Presence:
    """A parcel that is on the device, or on its way."""

    parcel: Parcel
    region: torch.Tensor
    arrival: Arrival
    lease: Lease | None  # its place in the ring; None: it stays, or has memory of its own
    weights: list[nn.Parameter] | None = None  # as they lie in the region, once they are needed
    versions: Any = None  # of the weights when modules saw them first; None: modules do not see them
    users: int = 0

    def show(self, away: Absences, recorder: Recorder, rooms: Rooms) -> None:
        """Modules find the weights, with what others wrote into what stood for them."""
        recorder.waited(self.arrival.settle())
        weights = self.weights or rooms.known_views(self.parcel, self.lease)
        if weights is None or away.any_written(self.parcel):
            with recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
                if weights is None:
                    weights = self.parcel.views(self.region)
                    rooms.keep_views(self.parcel, self.lease, weights)
                weights = away.with_written(self.parcel, weights)
        self.weights, self.versions = weights, versions_of(weights)
        self.parcel.show(away[self.parcel], weights)

    def hide(self, away: Absences) -> None:
        """Modules find what stands for the weights: what others do between two uses is done to that, and known."""
        if self.weights is None or self.versions is None:
            return
        self.parcel.show(self.weights, away[self.parcel])
        if versions_of(self.weights) != self.versions:
            away.keep_changed(self.parcel, self.weights, self.versions)
        self.versions = None

    def copy_of(self, index: int) -> torch.Tensor:
        """A copy of one weight, which has come."""
        with torch.no_grad():
            return (self.weights or self.parcel.views(self.region))[index].detach().clone()
