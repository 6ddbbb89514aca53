"""A network that is run by its exported graph → its layers, none of which is called, as a CallProfiler sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from tightfit.measure.call_profiler import CallProfiler
from tightfit.measure.modules import find_blocks, find_layers

__all__ = ["follow_graph"]

Watch = Callable[[nn.Module, Callable[[], None], Callable[[], None], Callable[..., object]], None]


def follow_graph(profiler: CallProfiler, name: str, module: nn.Module, watch: Watch, undo: ExitStack) -> None:
    """Tell `profiler` of the layers of `module`, the component `name`, that run, by the callbacks of `watch`.

    A block runs from its first layer to the next layer that is not in it.
    """
    blocks = find_blocks(module)

    def begin(block: str, layer: str) -> None:
        if (call := profiler.at_work) is not None and call.component == name:
            if call.segments[-1].block != block:
                profiler.turn(block)
            call.layer = layer

    def end() -> None:
        if (call := profiler.at_work) is not None and call.component == name:
            call.layer = ""

    for layer, parts in find_layers(module).items():
        block = next((path for path in blocks if f"{layer}.".startswith(f"{path}.")), "")
        for part in parts:
            watch(part, functools.partial(begin, block, layer), end, undo.callback)
