"""What changes from step to step in calls that skip nothing: from it, step caches get settings for a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tightfit.apply.activations.caches.conditions import relative_change

__all__ = ["StepChanges"]


class StepChanges:
    """Changes of one guidance prediction of one call."""

    def __init__(self) -> None:
        self.compared: dict[int, float] = {}  # by step: of what the strategy compares, since the step before
        self.reused: dict[int, float] = {}  # of what it reuses
        self.magnitudes: dict[int, float] = {}  # by step: size of what it reuses over that in the step before
        self._before: list[torch.Tensor] = []

    def note_compared(self, step: int, change: float | None) -> None:
        if change is not None:
            self.compared[step] = change

    def note_reused(self, step: int, value: Sequence[torch.Tensor]) -> None:
        """Note what would be reused after `step`."""
        before, self._before = self._before, [each.clone() for each in value]
        if len(before) != len(value) or not value:
            return
        largest = max(range(len(value)), key=lambda index: value[index].numel())
        change = relative_change(value[largest], before[largest])
        sizes = [float(each[largest].float().norm(dim=-1).mean()) for each in (value, before)]
        if change is not None and sizes[1]:
            self.reused[step], self.magnitudes[step] = change, sizes[0] / sizes[1]
