"""Out of memory in the middle of a step: something that stays gives up its place, and the same work is done again.

A block of a network makes its output from its inputs and changes neither; so what ran out of memory half way can be
run anew, unless it had already written into its inputs, which their version counters tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.disguise import disguise
from tightfit.apply.gates import wrap

__all__ = ["rescue_blocks", "rescued"]


def rescue_blocks(blocks: dict[str, nn.Module], shed: Callable[[str], bool], undo: ExitStack) -> None:
    """Lets each of `blocks` run again as long as `shed` (given its name) says that there is more room now."""
    for name, block in blocks.items():
        give_way = functools.partial(shed, name)
        if block._compiled_call_impl is None:
            undo.callback(disguise(block, forward=rescued(type(block).forward, give_way)))
        else:
            wrap(block, functools.partial(rescued, shed=give_way), undo.callback)


def rescued(method: Callable[..., Any], shed: Callable[[], bool]) -> Callable[..., Any]:
    """`method`, run again after each OutOfMemoryError while `shed` makes room and its inputs are as they were."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        before = _versions(given)
        while True:
            try:
                return method(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # its frames hold what was computed so far
            if _versions(given) != before or not shed():
                raise failure

    return run


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
