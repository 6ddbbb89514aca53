"""Feed-forwards in chunks of tokens: their inner activation, several times as wide as the tokens, is never whole.

Feed-forwards are found by their layers and tested on their first tokens: if two halves give another result than both
together, tokens depend on each other, and the module runs unchanged.

In FLUX.1's single-stream blocks, one projection takes the wide activation and the attention output together; there it
is no module of its own and stays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.apply.activations.outputs import agree
from tightfit.apply.method_overrides import override_class_members
from tightfit.measure.modules import compiled_around, find_blocks

__all__ = ["chunk_feed_forwards", "find_feed_forwards", "inside_feed_forwards"]

EVEN = 64  # tokens; chunks are multiples of it: kernels then mostly round as they do for all tokens
TRIAL = 8  # tokens in the test
TOLERANCE = 2.0**-6  # relative to the largest number: far above bfloat16 rounding, far below the effect of other tokens


def chunk_feed_forwards(network: nn.Module, size: int, undo: ExitStack) -> None:
    """Run the feed-forwards in `network`'s blocks on chunks of tokens, with inner activations of at most `size` bytes.

    Results are equal up to rounding. The same layers are called once per chunk, so their weights should stay on the
    device meanwhile: `inside_feed_forwards` gives these layers and the feed-forward of each.
    """
    for module, width in dict(find_feed_forwards(network)).items():  # a module may be in several blocks
        undo.callback(override_class_members(module, forward=_in_chunks(type(module).forward, width, size)))


def find_feed_forwards(network: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the uncompiled feed-forwards in `network`'s blocks, with the total width of their inner activations."""
    if network._compiled_call_impl is not None:
        return
    compiled = compiled_around(network)
    for block in find_blocks(network).values():
        yield from ((module, width) for module, width in _outermost(block) if id(module) not in compiled)


def inside_feed_forwards(network: nn.Module) -> dict[int, nn.Module]:
    """Map the id of each module inside the feed-forwards of `network` to its feed-forward."""
    return {id(part): module for module, _ in find_feed_forwards(network) for part in module.modules()}


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    width = _inner_width(module)
    if width:
        yield module, width
        return
    for child in module.children():
        yield from _outermost(child)


def _inner_width(module: nn.Module) -> int:
    """Elements per token in all inner activations of `module`; 0 if it is not a feed-forward.

    A feed-forward consists of linear layers and modules whose parameters are vectors or absent (norms, activations).
    Each linear layer widens the tokens, or narrows a widened activation (or half of it, if the other half is its gate)
    back.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # these have no forward
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
    """Wrap `forward` (module first) to run with at most `size` bytes of activations of `width` elements per token."""
    each_alone: bool | None = None  # whether tokens are independent; None: not tested yet

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
        return _run_chunks(work, tokens, most) if each_alone else work(tokens)

    return run


def _run_chunks(work: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Run `work` on at most `most` tokens at a time, writing the results into one tensor."""
    whole: torch.Tensor | None = None
    for start in range(0, tokens.shape[-2], most):
        some = tokens[..., start : start + most, :]
        part = work(some.contiguous())  # torch's linear layers take another code path for non-contiguous tokens
        if whole is None:
            whole = part.new_empty((*tokens.shape[:-1], part.shape[-1]))
        whole[..., start : start + most, :] = part
    assert whole is not None  # there is at least one token
    return whole


def _stand_alone(work: Callable[[torch.Tensor], Any], tokens: torch.Tensor) -> bool:
    """Whether the first tokens give the same result in two halves as together."""
    some = tokens[..., :TRIAL, :].contiguous()
    together = work(some)
    if not isinstance(together, torch.Tensor) or together.shape[:-1] != some.shape[:-1]:
        return False
    apart = _run_chunks(work, some, -(-some.shape[-2] // 2))
    return agree(apart, together, TOLERANCE)
