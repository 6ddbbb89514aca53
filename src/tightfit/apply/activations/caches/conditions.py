"""When a step is skipped: conditions of step caches, from numbers of one step to those of the steps before.

A condition keeps tensors to compare with, whose bytes count as kept. On a simulated card, whose tensors have no values,
thresholds cannot be compared: there every second step is skipped, unless the plan names the steps.
"""

from __future__ import annotations

import copy

import torch

from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.schema.step_cache import StepCache
from tightfit.simulator.operations import NAME
from tightfit.simulator.storage import store_of

__all__ = ["SkipCondition", "always_runs", "mean_change", "mean_size", "relative_change"]


class SkipCondition:
    """Whether steps of one branch are skipped, one after another."""

    def __init__(self, settings: StepCache) -> None:
        self._settings = settings
        self._skipped = 0  # steps skipped in a row
        self._ran: int | None = None  # last step that ran
        self._compared: torch.Tensor | None = None
        self._accumulated = 0.0
        self._ratio = 1.0

    @property
    def device_bytes(self) -> int:
        """Bytes of the tensor that the next step is compared with."""
        return 0 if self._compared is None else self._compared.nbytes

    def foreseen(self, call: DenoiserCall) -> bool | None:
        """Whether `call` is skipped, if that is known before it begins; None if it depends on its tensors."""
        settings = self._settings
        if settings.skipped_steps is not None:
            return call.step in settings.skipped_steps
        most = settings.value("most_skipped")
        if always_runs(settings, call) or (most is not None and self._skipped >= most):
            return False
        if settings.kind.decides == "interval":
            return self.within(call.step, settings.value("interval"))
        if settings.kind.decides == "magnitudes":
            return self._within_magnitudes(call)
        return None

    def after(self, call: DenoiserCall, *, skipped: bool) -> SkipCondition:
        """Return a copy of it as it will be after `call`."""
        later = copy.copy(self)
        later.note(call, None, skipped=skipped)
        return later

    def within(self, step: int, interval: int) -> bool:
        """Whether fewer than `interval` steps have passed since the last that ran."""
        return self._ran is not None and step - self._ran < interval

    def decide(self, call: DenoiserCall, seen: torch.Tensor) -> bool:
        """Whether `call` is skipped, given the tensor `seen` that the strategy compares from step to step."""
        threshold, before = self._settings.value("threshold"), self._compared
        if before is None or before.shape != seen.shape:
            return False
        change = self.change_to(seen)
        if change is None:  # no values
            return self.alternates(call)
        if self._settings.kind.decides == "first blocks":
            return change <= float(threshold)
        return self.adds_up(self._rescaled(change))

    def change_to(self, seen: torch.Tensor) -> float | None:
        """Return how much `seen` differs from what it is compared with; None if there is none such, or no values."""
        before = self._compared
        return None if before is None or before.shape != seen.shape else relative_change(seen, before)

    def alternates(self, call: DenoiserCall) -> bool:
        """Whether `call` is skipped where there are no values to compare: every second step is."""
        return self.within(call.step, 2)

    def adds_up(self, change: float) -> bool:
        """Whether `change` and those since the last step that ran are less than the threshold together."""
        self._accumulated += change
        return self._accumulated < float(self._settings.value("threshold"))

    def _rescaled(self, change: float) -> float:
        coefficients, result = self._settings.coefficients, 0.0
        if coefficients is None:
            return change
        for coefficient in coefficients:
            result = result * change + coefficient
        return result

    def _within_magnitudes(self, call: DenoiserCall) -> bool:
        return self._accumulated + abs(1.0 - self._next_ratio(call)) <= float(self._settings.value("threshold"))

    def _next_ratio(self, call: DenoiserCall) -> float:
        """Return how much larger what the blocks add is in `call` than in the last step that ran, by `magnitudes`."""
        magnitudes = self._settings.magnitudes or ()
        place = call.step if call.steps is None else round(call.step * (len(magnitudes) - 1) / max(call.steps - 1, 1))
        return self._ratio * (magnitudes[place] if place < len(magnitudes) else 1.0)

    def note(self, call: DenoiserCall, seen: torch.Tensor | None, *, skipped: bool) -> None:
        """Note what was decided; `seen` is what the next step is compared with, if the strategy compares."""
        if not skipped:
            self._ran, self._accumulated, self._ratio = call.step, 0.0, 1.0
        elif self._settings.kind.decides == "magnitudes":
            self._ratio = self._next_ratio(call)
            self._accumulated += abs(1.0 - self._ratio)
        self._skipped = self._skipped + 1 if skipped else 0
        if seen is not None and (not skipped or self._settings.kind.decides != "first blocks"):
            self._compared = seen.detach()


def always_runs(settings: StepCache, call: DenoiserCall) -> bool:
    """Whether `call` warms up or cools down."""
    late = call.steps is not None and call.step >= call.steps - int(settings.value("cool_down"))
    return late or call.step < max(int(settings.value("warm_up")), 1)


def relative_change(new: torch.Tensor, old: torch.Tensor) -> float | None:
    """Return the mean absolute difference over the mean absolute value of `old`; None for tensors without values."""
    return _number((new - old).abs().mean() / old.abs().mean())


def mean_change(new: torch.Tensor, old: torch.Tensor) -> float | None:
    """Return the mean absolute difference; None for tensors without values."""
    return _number((new - old).abs().mean())


def _number(tensor: torch.Tensor) -> float | None:
    if tensor.device.type == NAME and (store := store_of(tensor)).values is None and store.fill is None:
        store.card.block_host()  # a simulated card's host waits all the same; an error would keep what is compared
        return None
    return float(tensor.item())


def mean_size(tensor: torch.Tensor) -> float:
    """Return the mean absolute value."""
    return float(tensor.abs().mean().item())
