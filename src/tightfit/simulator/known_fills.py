"""Tensors on a card without values whose elements are all equal to a known number, the fill.

HunyuanVideo 1.5 branches on whether its image embedding is all zeros. For a tensor that is too large to keep its
values, the fill is propagated through copies and comparisons.
"""

from __future__ import annotations

from typing import Any

import torch

from tightfit.simulator.storage import store_of

__all__ = ["FOLLOWED", "fill_of"]

_aten = torch.ops.aten
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}
_COPIES = {_aten._to_copy.default, _aten.clone.default, _aten.copy_.default, _aten.repeat.default}
_QUESTIONS = {_aten.all.default, _aten.any.default} | {
    getattr(_aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
FOLLOWED = _FILLS | _COPIES | _QUESTIONS  # operations whose results may have a known fill


def fill_of(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool | int | float | None:
    """Return the value of all elements of the result of `op`, one of FOLLOWED; None where it is not known."""
    if op in _FILLS:
        filled: bool | int | float = args[1] if len(args) > 1 else 0
        return filled
    source = args[1 if op is _aten.copy_.default else 0]
    known = store_of(source).fill
    if known is None or op in _COPIES:
        return known
    answer: bool = op(torch.tensor([known], dtype=source.dtype), *args[1:]).item()
    return answer
