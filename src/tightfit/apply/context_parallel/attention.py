"""Attention of which each rank has some rows of the queries, keys and values: by a ring of keys, or by heads.

In a ring (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023), keys and values go
from rank to rank while each attends to those that it has, and partial results are merged by their log-sum-exp. By heads
(Jacobs et al., "DeepSpeed Ulysses", 2023), each rank exchanges rows of all heads for all rows of some heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.devices.cuda_support import attention_support
from tightfit.schema.attention import AttentionCall, unsupported

__all__ = ["AttentionInputs", "attend_by_heads", "attend_in_ring"]


class AttentionInputs(NamedTuple):
    """Queries, keys and values, (batch, heads, rows, width), of which the keys are those of this rank's share.

    `mask` is broadcast to (batch, heads, queries, all keys), boolean or added; None: all queries attend to all keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None


def attend_in_ring(inputs: AttentionInputs, shares: Sequence[Span], group: RankGroup) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys of all ranks, which have the rows `shares`; no mask."""
    query, key, value, _, scale = inputs
    pair = torch.stack((key, value))
    found = None
    for step in range(group.size):
        upcoming = shares[(group.rank - step - 1) % group.size]
        coming = arrived = None
        if step < group.size - 1:
            coming = pair.new_empty((*pair.shape[:-2], _length(upcoming), pair.shape[-1]))
            arrived = group.pass_on(pair, coming)
        part = _partial(query, pair[0], pair[1], scale)
        found = part if found is None else _merged(found, part)
        if coming is not None and arrived is not None:
            arrived()
            pair = coming
    assert found is not None
    return found[0].to(query.dtype)


def attend_by_heads(
    inputs: AttentionInputs, queries: Sequence[Span], shares: Sequence[Span], group: RankGroup
) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys of all ranks; ranks have the rows `queries` and `shares`.

    The numbers of heads of queries and of keys are multiples of the number of ranks.
    """
    query, key, value, mask, scale = inputs
    whole_query = _rows_for_heads(query, queries, group)
    whole_key, whole_value = (_rows_for_heads(each, shares, group) for each in (key, value))
    if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        mask = mask.chunk(group.size, dim=1)[group.rank]
    grouped = whole_query.shape[1] != whole_key.shape[1]
    done = F.scaled_dot_product_attention(
        whole_query, whole_key, whole_value, attn_mask=mask, scale=scale, enable_gqa=grouped
    )
    pieces = dict(enumerate(torch.split(done, [_length(span) for span in queries], dim=2)))
    own = pieces[group.rank].shape
    return torch.cat(group.all_to_all(pieces, dict.fromkeys(range(group.size), own)), dim=1)


def _rows_for_heads(tensor: torch.Tensor, spans: Sequence[Span], group: RankGroup) -> torch.Tensor:
    """Return all rows of this rank's share of the heads, for some rows of all heads."""
    pieces = dict(enumerate(tensor.chunk(group.size, dim=1)))
    batch, heads, _, width = pieces[group.rank].shape
    shapes = {rank: (batch, heads, _length(span), width) for rank, span in enumerate(spans)}
    return torch.cat(group.all_to_all(pieces, shapes), dim=2)


def _partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to some keys, and the log-sum-exp of scores, (batch, heads, queries, 1); in float32."""
    if query.shape[1] != key.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    kernel = _fused_kernel(query, key, value)
    if kernel is not None:
        done, total, *_ = _FUSED[kernel](query, key, value, factor)
        return done.float(), total[..., : query.shape[-2]].float().unsqueeze(-1)
    scores = (query.float() * factor) @ key.float().transpose(-1, -2)
    total = scores.logsumexp(-1, keepdim=True)
    return (scores - total).exp_() @ value.float(), total


_aten = torch.ops.aten
_FUSED: Mapping[str, Callable[..., Sequence[torch.Tensor]]] = {  # each returns the attention and its log-sum-exp first
    "cpu": lambda q, k, v, scale: _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale),
    "flash": lambda q, k, v, scale: _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale),
    "efficient": lambda q, k, v, scale: _aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, scale=scale
    ),
}


def _fused_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return the name of the fused kernel that takes these, as torch would choose it; None: their scores are kept."""
    if query.device.type == "cpu":
        return "cpu"
    capability, flash = attention_support(query.device)
    call = AttentionCall.of(query, key, value, capability=capability, flash=flash)
    kernels = ("flash", "efficient") if query.shape[-1] % 8 == 0 else ("efficient",)  # flash needs padded heads else
    return next((name for name in kernels if unsupported(name, call) is None), None)


def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp over the keys of both.

    Their shares add up to 1 by construction: exponentials of differences to the common log-sum-exp would not, and the
    result would be three times as far from the exact one.
    """
    share = torch.sigmoid(one[1] - other[1])
    return torch.lerp(other[0], one[0], share), torch.logaddexp(one[1], other[1])


def _length(span: Span) -> int:
    return span.hi - span.lo
