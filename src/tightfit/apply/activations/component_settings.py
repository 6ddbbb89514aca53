"""The activation settings of one component's plan, put into its modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torch import nn

from tightfit.apply.activations.activation_offload import offload_waiting_activations
from tightfit.apply.activations.ffn_chunking import chunk_feed_forwards
from tightfit.apply.activations.gradient_checkpointing import checkpoint_blocks
from tightfit.apply.activations.max_batch import chunk_blocks
from tightfit.devices.device import Device
from tightfit.measure.modules import has_skips
from tightfit.measure.recorder import Recorder
from tightfit.schema.plan import ComponentPlan

__all__ = ["change_activations"]


def change_activations(
    module: nn.Module,
    plan: ComponentPlan,
    device: Device,
    recorder: Recorder,
    undo: ExitStack,
    *,
    offloads: bool,
    recompute: Callable[[], AbstractContextManager[object]],
    replaced: bool,
) -> None:
    """Change how `module` handles its activations.

    With `offloads`, those that a later block needs wait in host memory. `recompute` is the context of blocks that run
    again in a backward pass. `replaced`: another forward runs in place of the module's own.
    """
    if plan.ffn_chunk is not None:
        chunk_feed_forwards(module, plan.ffn_chunk, undo)
    if plan.splits_batch and plan.placement == "stream":  # per block: weights are loaded once for all parts
        chunk_blocks(module, plan.max_batch, undo, recorder.note)
    if offloads and has_skips(module) and not replaced:
        offload_waiting_activations(module, device, recorder, undo)
    saves, auto = plan.checkpoints_gradients and not replaced, plan.gradient_checkpointing is None
    checkpoint_blocks(module, recompute, undo.callback, saves=saves, unless_recorded=auto)
