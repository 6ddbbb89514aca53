"""CPU replacements for backward kernels that only CUDA has: fused attention and RMS norm. Workspace is not counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

__all__ = ["BACKWARD_STAND_INS"]

_aten = torch.ops.aten


def _attention_gradients(named: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values, in their dtypes and layouts.

    `named` are arguments of a fused backward operation by their names in its schema, on the CPU or on meta.
    """
    parts = [named[name] for name in ("query", "key", "value")]
    found = [torch.empty_like(part) for part in parts]
    if parts[0].is_meta:
        return found
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    query, key, value = (part.to(wide) for part in parts)
    given = named.get("grad_out", named.get("grad_out_")).to(wide)
    scale = query.shape[-1] ** -0.5 if named.get("scale") is None else named["scale"]
    scores = scale * (query @ key.transpose(-1, -2))
    if named.get("attn_bias") is not None:
        scores = scores + named["attn_bias"].to(wide)
    if named.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    shares = scores.softmax(-1)
    of_shares = given @ value.transpose(-1, -2)
    of_scores = scale * shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
    made = (of_scores @ key, of_scores.transpose(-1, -2) @ query, shares.transpose(-1, -2) @ given)
    for target, source in zip(found, made, strict=True):
        target.copy_(source)
    return found


def _attention(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    mask = named.get("grad_input_mask")
    if named.get("dropout_p") or (mask is not None and mask[3]):
        raise NotImplementedError("a simulated card has no gradients of attention with dropout, nor of its mask")
    found = _attention_gradients(named)
    return (*found, None) if mask is not None else tuple(found)


def _rms_norm(
    given: torch.Tensor,
    maps: torch.Tensor,
    shape: list[int],
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    of_maps = torch.empty_like(maps) if mask[0] else None
    of_weight = torch.empty_like(weight) if mask[1] and weight is not None else None
    if maps.is_meta:
        return of_maps, of_weight
    wide = torch.promote_types(maps.dtype, torch.float32)
    normed, gradient = maps.to(wide) * scale, given.to(wide)
    if of_weight is not None:
        of_weight.copy_((gradient * normed).sum_to_size(shape))
    if of_maps is not None:
        gradient = gradient if weight is None else gradient * weight.to(wide)
        mean = (gradient * normed).mean(list(range(-len(shape), 0)), keepdim=True)
        of_maps.copy_(scale * (gradient - normed * mean))
    return of_maps, of_weight


_ATTENTION = (
    _aten._scaled_dot_product_cudnn_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
)
BACKWARD_STAND_INS: Mapping[torch._ops.OpOverload, Callable[..., tuple[Any, ...]]] = {
    _aten._fused_rms_norm_backward.default: _rms_norm,
    **{op: partial(_attention, op) for op in _ATTENTION},
}
