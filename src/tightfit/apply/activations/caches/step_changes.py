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
        self._before: torch.Tensor | None = None

    def note_compared(self, step: int, change: float | None) -> None:
        if change is not None:
            self.compared[step] = change

    def note_reused(self, step: int, value: Sequence[torch.Tensor]) -> None:
        """Note what would be reused after `step`: of its largest tensor, which is compared in host memory."""
        before = self._before
        now = self._before = max((each.detach() for each in value), key=torch.numel).cpu().clone() if value else None
        if now is None or before is None or now.shape != before.shape:
            return
        change = relative_change(now, before)
        sizes = [float(each.float().norm(dim=-1).mean()) for each in (now, before)]
        if change is not None and sizes[1]:
            self.reused[step], self.magnitudes[step] = change, sizes[0] / sizes[1]
