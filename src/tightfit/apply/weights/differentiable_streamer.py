"""A streamer whose component can be differentiated: weights that autograd saved are loaded again when they are needed.

A weight that requires a gradient is, while its layer runs, a function of its source parameter, which gets the gradient
in host memory: any optimizer finds it there, as without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tightfit.apply.weights.backward_loader import BackwardLoader
from tightfit.apply.weights.gradients import Links, SavedWeights, in_backward
from tightfit.apply.weights.loaded_group import LoadedGroup
from tightfit.apply.weights.offloaded_parameter import Versions, versions_of
from tightfit.apply.weights.streamer import Streamer
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.device import Device
from tightfit.errors import RunError
from tightfit.measure.recorder import Recorder

__all__ = ["DifferentiableStreamer"]


class _Pass(NamedTuple):
    """A forward pass of a gate with gradients; `repeated`: within a backward pass, by a gradient checkpoint."""

    gate: nn.Module
    repeated: bool
    loaded: list[LoadedGroup]
    links: Links
    saving: SavedWeights

    def end(self) -> None:
        self.saving.__exit__(None, None, None)
        self.links.undo()


class DifferentiableStreamer(Streamer):
    """A Streamer that also runs with gradients enabled.

    A backward pass holds weights of `backward_limit` bytes, but no more than a forward pass. `begins_backward` is
    called before weights are loaded again.
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        resident: Collection[str],
        ring: int,
        device: Device,
        recorder: Recorder,
        backward_limit: int,
        begins_backward: Callable[[], None],
    ) -> None:
        super().__init__(groups, resident, ring, device, recorder)
        self._begins_backward = begins_backward
        limit = min(backward_limit, self._pool.planned)
        self._backward_loader = BackwardLoader(limit, self._stream, recorder, self._pool.extra)
        self._passes: list[_Pass] = []
        self._backward_runs = self._closed = False
        self._has_graph = False  # whether autograd saved anything in the last call
        self._resting: list[tuple[WeightGroup, Versions]] = []  # whose source parameters modules have between calls

    def begin(self, method: str = "forward", make_way: Callable[[int], None] | None = None) -> None:
        self._wake()
        super().begin(method, make_way)

    def rest(self) -> None:
        """End a call after which weights stay loaded, unless it made a graph: then a backward pass needs the room.

        Optimizers get the source parameters that require gradients.
        """
        if self._has_graph:
            self.clear()
        for group in self._groups if self.on_device else ():
            if group.store.writable and any(source_param.requires_grad for source_param in group.source_params):
                group.show(self._placeholders[group], group.source_params)
                self._resting.append((group, versions_of(group.source_params)))

    def _wake(self) -> None:
        resting, self._resting = self._resting, []
        if any(versions_of(group.source_params) != versions for group, versions in resting):
            self.clear()
            return
        for group, _ in resting:
            group.show(group.source_params, self._placeholders[group])

    def enter(self, gate: nn.Module) -> None:
        """Begin a forward pass of `gate`; with gradients enabled, what autograd saves of its weights is only named."""
        if not self._backward_runs and not torch.is_grad_enabled():  # as in nearly all calls
            super().enter(gate)
            return
        repeated = in_backward()
        if repeated:
            loaded = self._load_for_backward(self._behind[gate])
        else:
            super().enter(gate)
            loaded = [self._loaded[group] for group in self._behind[gate]]
        links, saving = Links(), SavedWeights(loaded, self._fetch_in_backward)
        for here in loaded:
            for source_param, seen in here.seen_by(self._leaves(here.group)):
                links.add(source_param, seen)
        self._passes.append(_Pass(gate, repeated, loaded, links, saving))
        saving.__enter__()

    def leave(self, gate: nn.Module) -> None:
        """End a forward pass of `gate`; torch calls this too where `enter` failed."""
        if not self._passes or self._passes[-1].gate is not gate:
            super().leave(gate)
            return
        ended = self._passes.pop()
        ended.end()
        self._has_graph = self._has_graph or ended.saving.used
        if ended.repeated:
            self._done_in_backward(ended.loaded)
        else:
            super().leave(gate)

    @property
    def in_use(self) -> bool:
        """Whether a forward pass uses weights now."""
        return any(here.users for here in self._loaded.values())

    def begin_backward(self) -> None:
        """Begin a backward pass: what the forward pass left on the device makes room."""
        if not self.in_use:
            self.clear()
        self._install_placeholders()
        self._backward_runs = True
        self._backward_loader.begin()

    def end_backward(self) -> None:
        """End a backward pass."""
        self._backward_runs = False
        self._backward_loader.end()
        if not self._complete:
            self.clear()

    def clear(self) -> None:
        while self._passes:
            self._passes.pop().end()
        self._resting, self._has_graph = [], False
        self._backward_loader.clear()
        super().clear()

    def close(self) -> None:
        """End: graphs that were made until now cannot be used any more."""
        self._closed = True

    def fetch(self, group: WeightGroup, index: int) -> torch.Tensor:
        if (
            self._closed and group.store.writable
        ):  # other code has kept a placeholder: its store has let go of its memory
            return group.source_params[index].detach().to(self._device.torch_device, copy=True)
        return super().fetch(group, index)

    def _load_for_backward(self, groups: Iterable[WeightGroup]) -> list[LoadedGroup]:
        used: list[LoadedGroup] = []
        try:
            for group in groups:
                here = self._fetch_in_backward(group)
                if not here.visible:
                    here.show(self._placeholders, self._recorder)
                here.users += 1
                used.append(here)
        except BaseException:
            self._done_in_backward(used)
            raise
        return used

    def _done_in_backward(self, loaded: Iterable[LoadedGroup]) -> None:
        for here in loaded:
            if here.let_go():
                here.hide(self._placeholders)

    def _fetch_in_backward(self, group: WeightGroup) -> LoadedGroup:
        if self._closed:
            raise RunError(
                f"this graph needs weights of {group.name}, which follow another plan by now, or none: call backward() "
                "before undo(), and before a call with another request"
            )
        self._begins_backward()
        return self._backward_loader[group]

    def _leaves(self, group: WeightGroup) -> Sequence[torch.Tensor]:
        """Return the parameters of `group` that other code has while the component does not run."""
        return group.source_params if group.store.writable else self._placeholders[group]
