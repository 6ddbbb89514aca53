"""Step caches over attention layers: what each returned is reused for some steps (Pyramid Attention Broadcast)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut, Work
from tightfit.apply.activations.caches.conditions import always_runs
from tightfit.apply.activations.caches.kept_tensors import KeptTensors
from tightfit.apply.activations.caches.step_counter import DenoiserCall
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.schema.step_cache import StepCache

__all__ = ["AttentionCache"]

Run = tuple[nn.Module, int]  # of a layer, and which of its runs in a call


class AttentionCache(BranchCache):
    """Reuses the outputs of attention layers, for `interval` steps, and `cross_interval` for attention to the prompt.

    A layer attends to the prompt alone if it is given the same `encoder_hidden_states` as the network itself or as the
    layers of its kind before it, beside its own input, and returns one tensor. Where a layer runs several times in a
    call, each time has an output of its own.
    """

    def __init__(
        self, layers: tuple[nn.Module, ...], settings: StepCache, host_pool: ActivationHostPool | None,
        leave_out: LeaveOut,
    ) -> None:  # fmt: skip
        super().__init__(settings, host_pool, leave_out)
        self._layers = layers
        self._values: dict[Run, KeptTensors] = {}
        self._specs: dict[Run, Any] = {}
        self._runs: Counter[nn.Module] = Counter()  # of each layer, in the call in progress
        self._cross: set[nn.Module] = set()
        self._reused: dict[bool, bool] = {}  # in the call in progress: whether they are reused
        self._ran: dict[bool, int] = {}  # last step in which layers ran, for those that attend to the prompt and others

    @property
    def kept(self) -> Iterator[KeptTensors]:
        return iter(self._values.values())

    def foreseen(self, call: DenoiserCall) -> bool | None:
        return any(self._foreseen(call).values())

    def _foreseen(self, call: DenoiserCall) -> dict[bool, bool]:
        """Return whether `call` reuses what layers returned, for those that attend to the prompt and for others."""
        able = self.able
        return {cross: able and self._reuses(call, cross) for cross in (False, True)}

    @property
    def skippable(self) -> tuple[nn.Module, ...]:
        return tuple({layer: None for layer, _ in self._values})

    def left_out_by(self, call: DenoiserCall) -> tuple[nn.Module, ...]:
        if self.failed is not None or not self._values:
            return ()
        reused = {cross: self._reuses(call, cross) for cross in (False, True)}
        return tuple(layer for layer in self.skippable if reused[layer in self._cross])

    def begin(self, call: DenoiserCall, skips: bool | None) -> None:
        self._reused = self._foreseen(call)
        self._runs.clear()
        super().begin(call, skips)
        if skips:
            self._leave_out([layer for layer in self.skippable if self._reused[layer in self._cross]])

    def _reuses(self, call: DenoiserCall, cross: bool) -> bool:
        """Whether `call` is one that reuses what layers returned that attend to the prompt (`cross`), or the others."""
        if self.settings.skipped_steps is not None:
            return call.step in self.settings.skipped_steps
        runs_now = self.call is not None and self.call.step < call.step and not self._reused[cross]
        ran = self.call.step if self.call is not None and runs_now else self._ran.get(cross)
        return self._within(call, ran, "cross_interval" if cross else "interval")

    def _within(self, call: DenoiserCall, ran: int | None, interval: str) -> bool:
        """Whether `call` is fewer than `interval` steps after `ran`, and neither warms up nor cools down."""
        soon = ran is not None and call.step - ran < self.settings.value(interval)
        return soon and not always_runs(self.settings, call)

    def _decided(self) -> None:
        pass  # each layer frees what it kept when it runs

    def module(self, module: nn.Module, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.call is not None
        run = module, self._runs[module]
        self._runs[module] += 1
        kept, cross = self._values.get(run), module in self._cross
        if kept is not None and self.skips and self._reused[cross] and kept.known:
            return tree_unflatten(self._predicted(kept, self.call), self._specs[run])
        if kept is not None:
            kept.drop()
        output = work(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if len(leaves) == 1 and _attends_to_another(args, kwargs):
                self._cross.add(module)
            if (kept := kept or self._new(module, leaves)) is not None:
                self._values[run], self._specs[run] = kept, spec
                kept.keep(self._own(leaves), self.call.step)
        return output

    def _new(self, module: nn.Module, leaves: list[torch.Tensor]) -> KeptTensors | None:
        """Return where an output of `module`, `leaves`, is kept; None: it is not."""
        return KeptTensors(0, self._host_pool)

    def _own(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what of a layer's output is kept."""
        return leaves

    def _predicted(self, kept: KeptTensors, call: DenoiserCall) -> list[torch.Tensor]:
        return kept.predicted(call.step)

    def end(self) -> None:
        assert self.call is not None
        self._note_ran(self.call, self._reused)
        super().end()

    def _note_ran(self, call: DenoiserCall, reused: dict[bool, bool]) -> None:
        self._ran |= {cross: call.step for cross, each in reused.items() if not each}

    def outlook(self, call: DenoiserCall) -> str:
        reused = self._foreseen(call)
        names = [name for name, each in (("own", reused[False]), ("prompt", reused[True])) if each]
        return " and ".join(names) if names else "runs" if self.able else "first"

    def repeat(self, call: DenoiserCall) -> None:
        reused = self._foreseen(call)
        self._note_ran(call, reused)
        self.skipped_last = any(reused.values())

    def forget(self) -> None:
        super().forget()
        self._values.clear()


def _attends_to_another(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention layer is given a second sequence, by diffusers' name for it."""
    other = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
    own = kwargs.get("hidden_states", args[0] if args else None)
    return isinstance(other, torch.Tensor) and other is not own
