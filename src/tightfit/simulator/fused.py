"""CPU replacements for CUDA's fused attention kernels and batch norm, with the same output layouts.

Values are computed on the CPU; on meta tensors there are none. Attention's layouts and sizes are those of
aten/src/ATen/native/transformers/cuda/attention.cu, flash_attn/flash_api.cpp (`mha_fwd`) and native/cudnn/MHA.cpp
(torch 2.11 to 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tightfit.simulator.fused_backward import BACKWARD_STAND_INS
from tightfit.simulator.output_layouts import laid_out, normed_by_cudnn

__all__ = ["STAND_INS"]

_aten = torch.ops.aten


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output = _laid_out(query, value)
    rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
    _fill(output, rows, (query, key, value, None, dropout_p, is_causal), scale)
    state, unused = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return output, rows, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output = _laid_out(query, value)
    rows = query.new_empty(query.shape[:-1], dtype=torch.float32) if compute_log_sumexp else None
    _fill(output, rows, (query, key, value, attn_bias, dropout_p, is_causal), scale)
    seed, offset = (query.new_zeros((), dtype=torch.int64) for _ in range(2))
    rows = None if rows is None else rows[..., None]
    return output, rows, None, None, query.shape[2], key.shape[2], seed, offset, None


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    rows = query.new_empty((batch, heads, -(-length // 32) * 32 if compute_log_sumexp else 0), dtype=torch.float32)
    _fill(output, rows[..., :length], (query, key, value, attn_bias, dropout_p, is_causal), scale)
    return output, rows, None, None  # the random seed and offset are not on the card


def _batch_norm(*args: Any) -> tuple[Any, ...]:
    """cuDNN saves no mean and variance, except in training."""
    made: tuple[Any, ...] = _aten.native_batch_norm.default(*args)
    if not args[0].is_meta:
        return made
    output, *kept = laid_out(_aten.native_batch_norm.default, args, {}, made)
    if normed_by_cudnn(args) and not args[5]:
        kept = [output.new_empty(0) for _ in kept]
    return output, *kept


STAND_INS: dict[torch._ops.OpOverload, Callable[..., tuple[Any, ...]]] = {
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten.native_batch_norm.default: _batch_norm,
    **BACKWARD_STAND_INS,
}


def _laid_out(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return an empty output whose dimensions have the same memory order as those of the queries."""
    order = sorted(range(4), key=query.stride, reverse=True)
    return torch.empty_permuted((*query.shape[:-1], value.shape[-1]), order, dtype=query.dtype, device=query.device)


def _fill(output: torch.Tensor, rows: torch.Tensor | None, inputs: tuple[Any, ...], scale: float | None) -> None:
    """Fill `output` with the CPU's values, if any; `rows` are logsumexps, which only the CPU's fused kernel returns."""
    query, key, value, mask, dropout, causal = inputs
    if query.is_meta:
        return
    if dropout == 0 and query.shape[-1] == key.shape[-1] == value.shape[-1]:
        fused = _aten._scaled_dot_product_flash_attention_for_cpu
        numbers, sums = fused(query, key, value, dropout, causal, attn_mask=mask, scale=scale)
    else:
        grouped = query.shape[1] != key.shape[1]
        numbers, _ = _aten._scaled_dot_product_attention_math(*inputs, scale=scale, enable_gqa=grouped)
        sums = torch.tensor(math.nan)
    output.copy_(numbers)
    if rows is not None and rows.numel():
        rows.copy_(sums)
