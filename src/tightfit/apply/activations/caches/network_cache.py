"""Step caches over a whole network: its output is predicted from that of earlier steps, and nothing of it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut, Work
from tightfit.apply.activations.caches.conditions import mean_change, mean_size
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.step_counter import call_inputs
from tightfit.apply.activations.outputs import take_apart
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.schema.step_cache import StepCache

__all__ = ["NetworkCache"]


class NetworkCache(BranchCache):
    """Leaves out all of a network.

    "output rate" (EasyCache): how much the output changes for a change of the latents is measured in steps that run;
    the changes of the output that it predicts are added up since the last of these. What is reused is the difference
    of output and latents, where both have the same shape.

    "taylor" (TaylorSeer's lite mode): the output is continued as a Taylor series over the steps.

    "linear in time" (MeanCache): the line through the outputs of the last two steps that ran, over the timestep.
    """

    def __init__(
        self, network: nn.Module, settings: StepCache, host_pool: ActivationHostPool | None, leave_out: LeaveOut
    ) -> None:
        super().__init__(settings, host_pool, leave_out)
        self._network = network
        self._value = KeptTensors(settings.value("order") or 0, host_pool)
        self._before = KeptTensors(0, host_pool)  # "linear in time": the value before that
        self._times: list[torch.Tensor] = []  # timesteps of both, the newest first
        self._rebuild: Any = None
        self._inputs: torch.Tensor | None = None  # latents of the last step
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None  # latents and output of the last step that ran
        self._same_shape = False  # whether output and latents have the same shape
        self._rate: float | None = None  # change of the output over that of the latents

    @property
    def kept(self) -> Iterator[KeptTensors]:
        yield self._value
        if self._in_time:
            yield self._before

    @property
    def skippable(self) -> tuple[nn.Module, ...]:
        return tuple(self._network.children())

    @property
    def _in_time(self) -> bool:
        return self.settings.kind.predicts == "linear in time"

    @property
    def shared(self) -> Iterator[torch.Tensor]:
        return (each for each in (self._inputs, *(self._latest or ()), *self._times) if each is not None)

    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return work(*args, **kwargs)  # there is none

    def network(self, network: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = call_inputs(network, args, kwargs)
        latents = next((each for each in tree_leaves(next(iter(given.values()), None)) if _is_floating(each)), None)
        if self.settings.kind.decides == "output rate" and latents is not None:
            self._decide_by_rate(latents)
        if self.skips:
            if self.settings.kind.decides == "output rate":
                self._inputs = latents
            return self._rebuild(self._predicted(given, latents))
        output = work(*args, **kwargs)
        self._keep(given, latents, output)
        return output

    def _decide_by_rate(self, latents: torch.Tensor) -> None:
        """Decide by the predicted change of the output since the last step."""
        assert self.call is not None
        if self.skips is None:
            self.skips = False
            if self._inputs is not None and self._latest is not None:
                change = mean_change(latents, self._inputs)
                if change is None:  # no values
                    self.skips = self.condition.alternates(self.call)
                elif (predicted := self._change_of_output(change)) is not None:
                    self.skips = self.condition.adds_up(predicted)
            self._decided()
        elif self.changes is not None and self._inputs is not None:
            change = mean_change(latents, self._inputs)
            self.changes.note_compared(self.call.step, None if change is None else self._change_of_output(change))
        self.condition.note(self.call, None, skipped=bool(self.skips))

    def _change_of_output(self, change: float) -> float | None:
        """Return the predicted relative change of the output for a `change` of the latents; None if not known yet."""
        if self._rate is None or self._latest is None:
            return None
        return self._rate * change / (mean_size(self._latest[1]) or 1.0)

    def _predicted(self, given: dict[str, Any], latents: torch.Tensor | None) -> list[torch.Tensor]:
        assert self.call is not None
        last = self._value.predicted(self.call.step, [latents] if self._adds(latents) else None)  # type: ignore[list-item]
        if not self._in_time:
            return last if self._adds(latents) else [each.clone() for each in last]
        now, newer, older = (each.float().mean() for each in (_timestep(given), *self._times))
        before = self._before.predicted(self.call.step)
        share = (now - newer) / (newer - older)
        return [new + ((new - old) * share).to(new.dtype) for new, old in zip(last, before, strict=True)]

    def _adds(self, latents: torch.Tensor | None) -> bool:
        return self.settings.kind.residual and latents is not None and self._same_shape

    def _keep(self, given: dict[str, Any], latents: torch.Tensor | None, output: Any) -> None:
        assert self.call is not None
        tensors, self._rebuild = take_apart(output)
        self._same_shape = len(tensors) == 1 and latents is not None and tensors[0].shape == latents.shape
        if self._in_time:
            if self._value.known:
                self._before.keep([each.clone() for each in self._value.predicted(self.call.step)], self.call.step)
            if isinstance(timestep := _timestep(given), torch.Tensor):
                self._times = [timestep.detach().clone(), *self._times][:2]  # it may be a view of all
            else:
                self.failed = "it is given no timestep"
        if self.settings.kind.decides == "output rate" and latents is not None:
            if self._latest is not None:
                moved = mean_change(latents, self._latest[0])
                changed = mean_change(tensors[0], self._latest[1])
                self._rate = changed / moved if moved and changed is not None else None
            self._inputs, self._latest = latents, (latents, tensors[0].detach())
        if latents is not None and self._adds(latents):
            tensors = [each - latents for each in tensors]
        self._value.keep(tensors, self.call.step)

    def _decided(self) -> None:
        if self.skips:
            self._leave_out(self.skippable)
        elif not self._in_time:
            super()._decided()


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _timestep(given: dict[str, Any]) -> Any:
    return given.get("timestep", given.get("timesteps"))
