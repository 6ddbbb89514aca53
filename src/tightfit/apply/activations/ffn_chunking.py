"""Feed-forward networks some tokens at a time: their inner map, several times as wide as the tokens, is never whole.

They are found by what they are made of, and tried out on the first tokens that they are given: where two halves
together give something else than both at once, tokens do not stand alone, and the module works as it was.

In FLUX.1's single-stream blocks the wide map is no module of its own (one projection takes it and the attention's
answer together): there it stays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.cfg_batching import agree
from tightfit.apply.method_overrides import override_class_members
from tightfit.measure.modules import compiled_around, find_blocks

__all__ = ["chunk_feed_forwards", "find_feed_forwards", "inside_feed_forwards"]

EVEN = 64  # tokens, of which chunks are multiples: kernels then mostly round as they do for all of them
TRIAL = 8  # tokens
TOLERANCE = 2.0**-6  # of the largest number: far above rounding in bfloat16, far below what other tokens do


def chunk_feed_forwards(network: nn.Module, size: int, undo: ExitStack) -> None:
    """Lets the feed-forwards in `network`'s blocks work on so few tokens at once that inner maps have `size` bytes.

    The same numbers up to rounding. The same layers are called for some of the tokens after others, so their weights
    should stay on the device meanwhile: `inside_feed_forwards` tells who has to wait for whom.
    """
    for module, width in dict(find_feed_forwards(network)).items():  # one may be in several blocks
        undo.callback(override_class_members(module, forward=_in_chunks(type(module).forward, width, size)))


def find_feed_forwards(network: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The feed-forwards in `network`'s blocks that are not compiled, each with the width of its inner maps together."""
    if network._compiled_call_impl is not None:
        return
    compiled = compiled_around(network)
    for block in find_blocks(network).values():
        yield from ((module, width) for module, width in _outermost(block) if id(module) not in compiled)


def inside_feed_forwards(network: nn.Module) -> dict[int, nn.Module]:
    """By id, the modules inside the feed-forwards of `network`, and the feed-forward of each."""
    return {id(part): module for module, _ in find_feed_forwards(network) for part in module.modules()}


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    width = _inner_width(module)
    if width:
        yield module, width
        return
    for child in module.children():
        yield from _outermost(child)


def _inner_width(module: nn.Module) -> int:
    """How many numbers a token has in all inner maps of `module`; 0 where it cannot be a feed-forward.

    One is made of linear layers and what has vectors for parameters or none (norms, activations). Each layer widens
    the tokens, or narrows what was widened (or half of that, where the other half gates it) to what they were.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # they have no forward of their own
        return 0
    linear = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            linear += [] if "lora_" in name else [part]
        elif any(parameter.ndim > 1 for parameter in part.parameters(recurse=False)):
            return 0
    width = min((part.out_features for part in linear), default=0)
    wide = [part.out_features for part in linear if part.in_features == width < part.out_features]
    narrowed = {out for whole in wide for out in (whole, whole // 2) if out > width}
    narrow = [part for part in linear if part.out_features == width and part.in_features in narrowed]
    return sum(wide) if narrow and len(wide) + len(narrow) == len(linear) else 0


def _in_chunks(forward: Callable[..., Any], width: int, size: int) -> Callable[..., Any]:
    """`forward` (of a module, which it takes first) for at most `size` bytes of maps of `width` numbers at a time."""
    each_alone: bool | None = None  # whether tokens stand alone; None: nobody has tried

    @functools.wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal each_alone
        tokens = args[0] if len(args) == 1 else None
        others = tree_leaves((args[1:], kwargs))
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or any(map(torch.is_tensor, others)):
            return forward(module, *args, **kwargs)
        work = functools.partial(forward, module, **kwargs)
        count = tokens.shape[-2]
        most = max(1, size * count // max(1, tokens.numel() // tokens.shape[-1] * width * tokens.itemsize))
        most -= most % EVEN if most > EVEN else 0
        if most >= count:
            return work(tokens)
        if each_alone is None:
            each_alone = _stand_alone(work, tokens)
        return _some_by_some(work, tokens, most) if each_alone else work(tokens)

    return run


def _some_by_some(work: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, most: int) -> torch.Tensor:
    """`work` on at most `most` tokens at a time, written into one tensor as they come."""
    whole: torch.Tensor | None = None
    for start in range(0, tokens.shape[-2], most):
        some = tokens[..., start : start + most, :]
        part = work(some.contiguous())  # torch's linear layers take another way where tokens are not
        if whole is None:
            whole = part.new_empty((*tokens.shape[:-1], part.shape[-1]))
        whole[..., start : start + most, :] = part
    assert whole is not None  # there is at least one token
    return whole


def _stand_alone(work: Callable[[torch.Tensor], Any], tokens: torch.Tensor) -> bool:
    """Whether the first tokens give the same in two halves as together."""
    some = tokens[..., :TRIAL, :].contiguous()
    together = work(some)
    if not isinstance(together, torch.Tensor) or together.shape[:-1] != some.shape[:-1]:
        return False
    apart = _some_by_some(work, some, -(-some.shape[-2] // 2))
    return agree(apart, together, TOLERANCE)
