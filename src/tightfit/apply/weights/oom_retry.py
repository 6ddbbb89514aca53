"""Out of memory in the middle of a step: something that stays gives up its place, and the same work is done again.

A block of a network makes its output from its inputs and changes neither; so what ran out of memory half way can be
run anew, unless it had already changed what it was given: a tensor, which its version counter tells, or a list of
caches, whose old entries nobody here may keep alive.
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
from tightfit.devices.cuda import release_unused
from tightfit.devices.out_of_memory import is_out_of_memory

__all__ = ["retry_blocks_on_oom", "retry_on_oom"]


def retry_blocks_on_oom(blocks: dict[str, nn.Module], shed: Callable[[str], bool], undo: ExitStack) -> None:
    """Lets each of `blocks` run again as long as `shed` (given its name) says that there is more room now."""
    for name, block in blocks.items():
        give_way = functools.partial(shed, name)
        if block._compiled_call_impl is None:
            undo.callback(override_class_members(block, forward=retry_on_oom(type(block).forward, give_way)))
        else:
            wrap(block, functools.partial(retry_on_oom, shed=give_way), undo.callback)


def retry_on_oom(method: Callable[..., Any], shed: Callable[[], bool]) -> Callable[..., Any]:
    """`method`, run again each time that memory runs out, while `shed` makes room and its inputs are as they were."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, cached = _seen(args, kwargs), True
        while True:
            try:
                return method(*args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # its frames hold what was computed so far
            if not _unchanged(before, _seen(args, kwargs)):
                raise failure
            outside = not isinstance(failure, torch.OutOfMemoryError)  # of torch's allocator: what that keeps may help
            if not (outside and cached) and not shed():
                raise failure
            if outside:
                release_unused()
                cached = False

    return run


def _seen(args: Any, kwargs: Any) -> list[tuple[Any, int]]:
    """What is given, tensors without keeping them alive, and how often each tensor was written to."""
    return [_seen_one(value) for value in tree_leaves((args, kwargs))]


def _seen_one(value: Any) -> tuple[Any, int]:
    if not isinstance(value, torch.Tensor):
        return value, 0
    return weakref.ref(value), 0 if value.is_inference() else value._version


def _unchanged(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    """Whether the same values are there, and the same tensors with the same numbers."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a == b and _is_same(x, y) for (x, a), (y, b) in pairs)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one() is other() is not None
    return one is other or (isinstance(one, int | float | str) and type(one) is type(other) and one == other)
