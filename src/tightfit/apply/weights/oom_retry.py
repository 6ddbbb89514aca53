"""Out of memory in the middle of a step: evict some resident weights, and run the same block again.

A block of a network computes its output from its inputs and changes neither. So a block that ran out of memory can
run again, unless it had already changed its inputs: a tensor, as its version counter shows, or a list of caches, whose
old entries must not be kept alive here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.method_overrides import override_class_members
from tightfit.apply.module_hooks import wrap
from tightfit.apply.weights.gradients import within_checkpoint
from tightfit.devices.cuda import release_unused
from tightfit.devices.memory import is_out_of_memory

__all__ = ["retry_blocks_on_oom", "retry_on_oom"]


def retry_blocks_on_oom(blocks: dict[str, nn.Module], free_memory: Callable[[str], bool], undo: ExitStack) -> None:
    """Let each of `blocks` run again after running out of memory, as long as `free_memory(name)` frees some."""
    for name, block in blocks.items():
        give_way = functools.partial(free_memory, name)
        if block._compiled_call_impl is None:
            undo.callback(override_class_members(block, forward=retry_on_oom(type(block).forward, give_way)))
        else:
            wrap(block, functools.partial(retry_on_oom, free_memory=give_way), undo.callback)


def retry_on_oom(method: Callable[..., Any], free_memory: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap `method` to run again when memory runs out, while `free_memory` frees some and its inputs are unchanged.

    Not within a gradient checkpoint, which counts what is saved in it: code around that runs it again as a whole.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, cached = _seen(args, kwargs), True
        while True:
            try:
                return method(*args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error) or within_checkpoint():
                    raise
                failure = error.with_traceback(None)  # its frames hold tensors computed so far
            if not _unchanged(before, _seen(args, kwargs)):
                raise failure
            outside = not isinstance(failure, torch.OutOfMemoryError)  # of torch's allocator; its cache may help
            if not (outside and cached) and not free_memory():
                raise failure
            if outside:
                release_unused()
                cached = False

    return run


def _seen(args: Any, kwargs: Any) -> list[tuple[Any, int]]:
    """Return the arguments, tensors as weak references, each with the tensor's version counter (0 for others)."""
    return [_seen_one(value) for value in tree_leaves((args, kwargs))]


def _seen_one(value: Any) -> tuple[Any, int]:
    if not isinstance(value, torch.Tensor):
        return value, 0
    return weakref.ref(value), 0 if value.is_inference() else value._version


def _unchanged(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    """Whether the arguments are the same, and tensors have the same version counters."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a == b and _is_same(x, y) for (x, a), (y, b) in pairs)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one() is other() is not None
    return one is other or (isinstance(one, int | float | str) and type(one) is type(other) and one == other)
