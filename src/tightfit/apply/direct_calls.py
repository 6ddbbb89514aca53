"""Calls of a component that no call of its pipeline makes, within a budget: nothing was planned for them.

A training loop calls the denoiser by itself, and other code calls parts of a pipeline before its first call is planned.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.call_runner import CallRunner, PlanHandle
from tightfit.apply.output_replay import RngState, without_frames
from tightfit.devices.device import Device
from tightfit.devices.memory import is_out_of_memory
from tightfit.schema.footprint import Role

__all__ = ["DirectCalls", "needs_gradients"]

GRADIENTS = "is called by itself, with gradients; give fit request={'backward': …} to have it planned"
MEMORY = "is called by itself, and memory ran out"


class DirectCalls(NamedTuple):
    """Runs direct calls of the component `name` of a pipeline that `handle` fitted."""

    handle: PlanHandle
    calls: CallRunner
    device: Device
    name: str
    role: Role

    def run(
        self,
        module: nn.Module,
        call: Callable[[], Any],
        again: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return `call()`, a call of `module` with these arguments; or `again()`, under a plan that needs less memory.

        That is followed before a denoiser's call with gradients, as memory may run out only in the backward pass; and
        when memory runs out in the call.
        """
        if self.calls.replans is None or self.handle.recorder.running:
            return call()
        if self.role == "denoiser" and needs_gradients(module, args, kwargs) and self._follow_level_3(GRADIENTS):
            return again()
        rng_state, handled = RngState(kwargs, self.device), sys.exception()
        try:
            return call()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = without_frames(error, handled)
        if not self._follow_level_3(MEMORY):
            raise failure
        rng_state.rewind()
        return again()

    def _follow_level_3(self, why: str) -> bool:
        """Follow the plan for direct calls; return whether that is another than the current one."""
        pipe, replans = self.handle.pipe, self.calls.replans
        if pipe is None or replans is None or replans.for_direct_calls(self.handle.plan, "") is None:
            return False
        self.handle.keep_up(pipe)  # layers have other names once an adapter was added
        plan = replans.for_direct_calls(self.handle.plan, f"{self.name} {why}")
        assert plan is not None
        self.handle.follow(pipe, plan)
        return True


def needs_gradients(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `module` with these arguments can be differentiated."""
    if not torch.is_grad_enabled():
        return False
    given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return any(tensor.requires_grad for tensor in itertools.chain(given, module.parameters()))
