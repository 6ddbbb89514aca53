"""A group's weights at one place in device memory, and when modules see them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from tightfit.apply.weights.offloaded_parameter import LazyWeights, Versions, versions_of
from tightfit.apply.weights.weight_groups import Table, WeightGroup
from tightfit.devices.copy_stream import CopyHandle
from tightfit.measure.recorder import Recorder
from tightfit.plan.prefetch import Lease

__all__ = ["LoadedGroup"]


@dataclass(eq=False)
class LoadedGroup:
    """A group at one place on the device: there, or on its way, since its latest `handle`.

    It is kept for the next time that the group comes to the same place: to make parameters takes the host 17 us.
    """

    group: WeightGroup
    region: torch.Tensor
    handle: CopyHandle = field(default_factory=CopyHandle)
    lease: Lease | None = None  # its place in the ring; None: it stays, or has memory of its own
    users: int = 0
    visible: bool = False  # whether modules see the weights
    weights: list[nn.Parameter] = field(default_factory=list)  # as modules see them, with what others wrote
    _views: list[nn.Parameter] | None = None  # as they lie in the region, once they were needed
    _versions: Versions = field(default_factory=list)  # of the weights when they were made
    _seen_at: list[tuple[Table, str, torch.Tensor, nn.Parameter]] | None = None  # with what is there meanwhile
    _others: bool = False  # whether others wrote some of the weights

    def show(self, away: LazyWeights, recorder: Recorder) -> None:
        """Modules find the weights, with what others wrote into what stood for them."""
        if waited := self.handle.wait_on_device():
            recorder.waited(waited)
        if self._seen_at is None or away.any_written(self.group):
            self._look(away, recorder)
        self.visible = True
        for table, name, gone, weight in self._seen_at or ():
            if table.get(name) is gone:  # what others put there stays
                table[name] = weight

    def _look(self, away: LazyWeights, recorder: Recorder) -> None:
        with recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
            if self._views is None:
                self._views = self.group.views(self.region)
            self.weights = away.with_written(self.group, self._views)
        self._versions = versions_of(self.weights)
        each = zip(self.group.places, away[self.group], self.weights, strict=True)
        self._seen_at = [(at.table, at.name, gone, weight) for places, gone, weight in each for at in places]
        self._others = away.any_written(self.group)

    def let_go(self) -> bool:
        """One user less; whether that was the last."""
        self.users -= 1
        return not self.users

    def hide(self, away: LazyWeights) -> None:
        """Modules find what stands for the weights: what others do between two uses is done to that, and known."""
        if not self.visible:
            return
        for table, name, gone, weight in self._seen_at or ():
            if table.get(name) is weight:
                table[name] = gone
        changed = versions_of(self.weights) != self._versions
        if changed:
            away.keep_changed(self.group, self.weights, self._versions)
        if changed or self._others:  # which are kept elsewhere, and not for the next time
            self._seen_at, self.weights = None, []
        self.visible = False

    def copy_of(self, index: int) -> torch.Tensor:
        """A copy of one weight, which has come."""
        with torch.no_grad():
            return (self.weights or self.group.views(self.region))[index].detach().clone()
