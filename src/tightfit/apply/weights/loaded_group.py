"""A weight group in one region of device memory, and whether modules see its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tightfit.apply.weights.offloaded_parameter import LazyWeights, Versions, versions_of
from tightfit.apply.weights.weight_groups import Table, WeightGroup
from tightfit.devices.copy_stream import CopyHandle
from tightfit.measure.recorder import Recorder
from tightfit.plan.prefetch import Lease

__all__ = ["LoadedGroup", "Seen"]

Seen = tuple[Table, str, torch.Tensor]  # where a module looks a weight up, and the weight


@dataclass(eq=False)
class LoadedGroup:
    """A weight group in one region of device memory; `handle` is the latest copy to it.

    It is kept for the next time that the group is loaded to this region: creating parameters takes the host 17 us.
    """

    group: WeightGroup
    region: torch.Tensor  # uint8
    handle: CopyHandle = field(default_factory=CopyHandle)
    lease: Lease | None = None  # of the ring; None: it is resident, or has memory of its own
    users: int = 0  # forward passes that use it
    visible: bool = False  # whether modules see the weights
    weights: list[nn.Parameter] = field(default_factory=list)  # as modules see them, with changes by other code
    _views: list[nn.Parameter] | None = None  # views of the region, made when first needed
    _versions: Versions = field(default_factory=list)  # of the weights when they were created
    _seen_at: list[tuple[Table, str, torch.Tensor, nn.Parameter]] | None = None  # with the placeholder
    _others: bool = False  # whether other code changed some of the weights

    def show(self, away: LazyWeights, recorder: Recorder) -> None:
        """Wait on the device for the copy, and put the weights, with changes by other code, into the modules."""
        if waited := self.handle.wait_on_device():
            recorder.waited(waited)
        if self._seen_at is None or away.any_written(self.group):
            self._look(away, recorder)
        self.visible = True
        for table, name, gone, weight in self._seen_at or ():
            if table.get(name) is gone:  # what other code put there is kept
                table[name] = weight

    def _look(self, away: LazyWeights, recorder: Recorder) -> None:
        with recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
            if self._views is None:
                self._views = self.group.views(self.region)
            self.weights = away.with_written(self.group, self._views)
        self._versions = versions_of(self.weights)
        each = zip(self.group.slots, away[self.group], self.weights, strict=True)
        self._seen_at = [(at.table, at.name, gone, weight) for slots, gone, weight in each for at in slots]
        self._others = away.any_written(self.group)

    def let_go(self) -> bool:
        """Remove one user; return whether it was the last."""
        self.users -= 1
        return not self.users

    def hide(self, away: LazyWeights) -> None:
        """Put the placeholders into the modules, which record what other code changes between two uses."""
        if not self.visible:
            return
        for table, name, gone, weight in self._seen_at or ():
            if table.get(name) is weight:
                table[name] = gone
        changed = versions_of(self.weights) != self._versions
        if changed:
            away.keep_changed(self.group, self.weights, self._versions)
        if changed or self._others:  # kept by `away`, not for the next time
            self._seen_at, self.weights = None, []
        self.visible = False

    def seen_by(self, leaves: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, list[Seen]]]:
        """Yield each of `leaves`, one for each weight, with where modules see that weight now."""
        for slots, leaf, weight in zip(self.group.slots, leaves, self.weights, strict=True):
            yield leaf, [(at.table, at.name, weight) for at in slots if at.found is weight]

    def copy_of(self, index: int) -> torch.Tensor:
        """Return a copy of one weight, which is loaded."""
        with torch.no_grad():
            return (self.weights or self.group.views(self.region))[index].detach().clone()
