"""Step caches over attention layers: what each returned is reused for some steps (Pyramid Attention Broadcast)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut, Work
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.schema.step_cache import StepCache

__all__ = ["AttentionCache"]


class AttentionCache(BranchCache):
    """Reuses the outputs of attention layers, for `interval` steps, and `cross_interval` for attention to the prompt.

    A layer attends to the prompt alone if it is given the same `encoder_hidden_states` as the network itself or as the
    layers of its kind before it, beside its own input, and returns one tensor.
    """

    def __init__(
        self, layers: tuple[nn.Module, ...], settings: StepCache, host_pool: ActivationHostPool | None,
        leave_out: LeaveOut,
    ) -> None:  # fmt: skip
        super().__init__(settings, host_pool, leave_out)
        self._layers = {layer: KeptTensors(0, host_pool) for layer in layers}
        self._specs: dict[nn.Module, Any] = {}
        self._cross: set[nn.Module] = set()
        self._reused: dict[bool, bool] = {}  # in the call in progress: whether they are reused
        self._ran: dict[bool, int] = {}  # last step in which layers ran, for those that attend to the prompt and others

    @property
    def kept(self) -> Iterator[KeptTensors]:
        return (self._layers[layer] for layer in self._specs)

    def foreseen(self, call: DenoiserCall) -> bool | None:
        return self.able and any(self._reuses(call, cross) for cross in (False, True))

    @property
    def skippable(self) -> tuple[nn.Module, ...]:
        return tuple(self._specs)

    def left_out_by(self, call: DenoiserCall) -> tuple[nn.Module, ...]:
        if self.failed is not None or not self._specs:
            return ()
        reused = {cross: self._reuses(call, cross) for cross in (False, True)}
        return tuple(layer for layer in self._specs if reused[layer in self._cross])

    def begin(self, call: DenoiserCall, skips: bool | None) -> None:
        self._reused = {cross: bool(skips) and self._reuses(call, cross) for cross in (False, True)}
        super().begin(call, skips)
        if skips:
            self._leave_out([layer for layer in self._specs if self._reused[layer in self._cross]])

    def _reuses(self, call: DenoiserCall, cross: bool) -> bool:
        """Whether `call` reuses what layers returned that attend to the prompt (`cross`), or the others."""
        settings = self.settings
        if settings.skipped_steps is not None:
            return call.step in settings.skipped_steps
        late = call.steps is not None and call.step >= call.steps - settings.value("cool_down")
        interval = settings.value("cross_interval" if cross else "interval")
        runs_now = self.call is not None and self.call.step < call.step and not self._reused[cross]
        ran = self.call.step if self.call is not None and runs_now else self._ran.get(cross)
        return ran is not None and call.step - ran < interval and not late and call.step >= settings.value("warm_up")

    def _decided(self) -> None:
        pass  # each layer frees what it kept when it runs

    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.call is not None
        kept, cross = self._layers[module], module in self._cross
        if self.skips and self._reused[cross] and kept.known:
            return tree_unflatten(kept.predicted(self.call.step), self._specs[module])
        kept.drop()
        output = work(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if len(leaves) == 1 and _attends_to_another(args, kwargs):
                self._cross.add(module)
            self._specs[module] = spec
            kept.keep(leaves, self.call.step)
        return output

    def end(self) -> None:
        assert self.call is not None
        self._ran |= {cross: self.call.step for cross, reused in self._reused.items() if not reused}
        super().end()


def _attends_to_another(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention layer is given a second sequence, by diffusers' name for it."""
    other = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
    own = kwargs.get("hidden_states", args[0] if args else None)
    return isinstance(other, torch.Tensor) and other is not own
