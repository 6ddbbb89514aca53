"""Gradient checkpointing: a block keeps only its inputs for the backward pass, and is run again there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightfit.apply.method_overrides import override_class_members
from tightfit.apply.module_hooks import wrap
from tightfit.apply.weights.gradients import in_backward
from tightfit.measure.modules import compiled_around, find_blocks

__all__ = ["attention_layers", "checkpoint_blocks", "may_record"]


def checkpoint_blocks(
    module: nn.Module,
    again: Callable[[], AbstractContextManager[Any]],
    undo: Callable[..., object],
    *,
    saves: bool,
    unless_recorded: bool = False,
) -> None:
    """Run each block of `module` in the context `again()` when it is run within a backward pass.

    With `saves`, blocks that run with gradients enabled are run again there, by torch.utils.checkpoint, with the same
    random numbers; otherwise only where other code checkpoints them. With `unless_recorded`, blocks with attention
    processors from outside of diffusers' models are not run again: they may record what they see, and would do so
    twice. `undo` receives how to undo it.
    """

    if module._compiled_call_impl is not None:  # its code is one graph
        return

    def around(block: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            with again() if in_backward() else nullcontext():
                return call(*args, **kwargs)

        attention = attention_layers(block)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # as in nearly all calls
                return call(*args, **kwargs)
            if saves and not (unless_recorded and may_record(attention)):
                return checkpoint(work, *args, use_reentrant=False, **kwargs)
            return work(*args, **kwargs)

        return run

    compiled = compiled_around(module)
    for block in find_blocks(module).values():
        if block._compiled_call_impl is not None:
            wrap(block, functools.partial(around, block), undo)
        elif id(block) not in compiled:  # its hooks run again, too: those that load weights are among them
            undo(override_class_members(block, __call__=around(block, type(block).__call__)))


def attention_layers(module: nn.Module) -> list[nn.Module]:
    """Return the submodules of `module` whose attention is computed by a processor, as diffusers calls it."""
    return [part for part in module.modules() if hasattr(part, "processor")]


def may_record(attention: Iterable[Any]) -> bool:
    """Whether processors of `attention` layers may record what they see, as pipelines that guide by attention do.

    That is: whether any is from outside of diffusers' models.
    """
    processors = (layer.processor for layer in attention)
    return any(each is not None and not type(each).__module__.startswith("diffusers.models.") for each in processors)
