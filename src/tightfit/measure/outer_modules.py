"""A network's blocks, and the outermost of its modules that are not in one: what runs in turn, from input to output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from tightfit.measure.modules import find_blocks

__all__ = ["follow_outer_modules", "outer_modules"]


def outer_modules(network: nn.Module) -> Iterator[str]:
    """Yield the paths of the blocks of `network`, and of the outermost modules that have no blocks inside."""
    blocks = set(find_blocks(network))
    around = {path[:end] for path in blocks for end, sign in enumerate(path) if sign == "."}

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in around:
                yield from walk(child, f"{path}.")
            elif path in blocks or type(child).forward is not nn.Module.forward:
                yield path

    return walk(network, "")


def follow_outer_modules(
    network: nn.Module,
    blocks: Mapping[str, nn.Module],
    enter: Callable[..., None],
    leave: Callable[..., None],
    outside: Callable[..., None],
    undo: ExitStack,
) -> None:
    """Call `enter(path, …)` and `leave(…)` around each of `blocks`, and `outside(path, …)` before the other ones.

    Until `undo` is closed.
    """
    for path, block in blocks.items():
        undo.callback(block.register_forward_pre_hook(functools.partial(enter, path), prepend=True).remove)
        undo.callback(block.register_forward_hook(leave, always_call=True).remove)
    for path in outer_modules(network) if blocks else ():
        if path not in blocks:
            module: Any = network.get_submodule(path)
            undo.callback(module.register_forward_pre_hook(functools.partial(outside, path), prepend=True).remove)
