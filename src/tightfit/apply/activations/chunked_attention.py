"""Exact attention in chunks of queries, so that the full score matrix never exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tightfit.errors import InputError

__all__ = ["Scores", "chunked_attention"]


def chunked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    chunk_bytes: int,
) -> torch.Tensor:
    """Return `scaled_dot_product_attention`, computed in chunks of at most `chunk_bytes` of scores (at least one row).

    Takes queries (…, L, E), keys (…, S, E) and values (…, S, Ev), and a boolean or additive mask that broadcasts to
    (…, L, S). Returns (…, L, Ev), contiguous, in the dtype of the queries. Computes in float32; float64 in float64.
    Rows whose keys are all masked become zeros, as in torch.

    Memory besides the result: two chunks, a quarter chunk more for a boolean mask, and the keys and values of the heads
    in a chunk where they have to be widened or repeated. InputError for dropout or gradients.
    """
    if dropout_p > 0:
        raise InputError(f"chunked attention cannot drop out: use dropout_p=0, not {dropout_p}", dropout=dropout_p)
    if torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)):
        raise InputError(f"chunked attention of {tuple(query.shape)} has no gradients: call it under torch.no_grad()")
    dimensions = max(query.ndim, key.ndim, value.ndim)
    query, key, value = _aligned(query, key, value, grouped=enable_gqa)
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    if output.numel() and key.numel():
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        _fill(output, _Inputs(query, key, value, mask, is_causal, scale), chunk_bytes)
    return output.view(output.shape[output.ndim - dimensions :])


@dataclass(frozen=True)
class _Inputs:
    """Queries, keys, values and mask with the same number of dimensions."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float

    def item(self, index: int) -> _Inputs:
        """Return the inputs at `index` of the first dimension."""
        mask = None if self.mask is None else self.mask[index]
        return replace(self, query=self.query[index], key=self.key[index], value=self.value[index], mask=mask)


def _aligned(*parts: torch.Tensor, grouped: bool) -> list[torch.Tensor]:
    """Return `parts` as views with equal leading dimensions, at least one of them before the heads.

    With `grouped`, each part keeps its own number of heads.
    """
    dimensions = max(4, *(part.ndim for part in parts))
    parts = tuple(part[(None,) * (dimensions - part.ndim)] for part in parts)
    batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))  # type: ignore[no-untyped-call]
    heads = None if grouped else torch.broadcast_shapes(*(part.shape[-3:-2] for part in parts))  # type: ignore[no-untyped-call]
    return [part.expand(*batch, *(heads or part.shape[-3:-2]), -1, -1) for part in parts]


def _fill(output: torch.Tensor, inputs: _Inputs, chunk_bytes: int) -> None:
    """Write the attention of `inputs` into `output`."""
    if output.ndim > 4:
        for index in range(output.shape[0]):
            _fill(output[index], inputs.item(index), chunk_bytes)
        return
    query, keys = inputs.query, inputs.key.shape[-2]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    items, heads, rows = _chunk_sizes(query.shape[:-1], max(1, chunk_bytes // (keys * dtype.itemsize)))
    buffers = torch.empty(2, items * heads * rows * keys, dtype=dtype, device=query.device)
    for some_items in _spans(query.shape[0], items):
        for some_heads in _spans(query.shape[1], heads):
            _fill_heads(output, inputs, (some_items, some_heads), rows, buffers)


def _fill_heads(
    output: torch.Tensor, inputs: _Inputs, place: tuple[slice, slice], rows: int, buffers: torch.Tensor
) -> None:
    """Write the attention of the items and heads at `place` into `output`, `rows` queries at a time."""
    items, heads = place
    count = inputs.query.shape[1]
    key, value = (_of_heads(part[items], heads, count).to(buffers.dtype) for part in (inputs.key, inputs.value))
    for some in _spans(inputs.query.shape[2], rows):
        here = (*place, some)
        query, mask = inputs.query[here].to(buffers.dtype), None if inputs.mask is None else inputs.mask[here]
        part = replace(inputs, query=query, key=key, value=value, mask=mask)
        output[here] = _attend(part, some.start, buffers)


def _attend(inputs: _Inputs, first: int, buffers: torch.Tensor) -> torch.Tensor:
    """Return the attention of one chunk, whose first row is query number `first`."""
    *leading, rows, _ = inputs.query.shape
    seen = inputs.key.shape[-2]
    if inputs.causal:
        seen = min(seen, first + rows)  # no query of the chunk attends to a later key
    shape = (*leading, rows, seen)
    scores, shares = (buffer[: math.prod(shape)].view(math.prod(leading), rows, seen) for buffer in buffers)
    query, key, value = (part.flatten(0, 1) for part in (inputs.query, inputs.key, inputs.value))
    torch.baddbmm(scores, query, key[:, :seen].mT, beta=0, alpha=inputs.scale, out=scores)
    if inputs.causal:
        later = scores[..., first:]
        later.masked_fill_(torch.ones(later.shape[-2:], dtype=torch.bool, device=later.device).triu_(1), -math.inf)
    if inputs.mask is not None:
        _apply(inputs.mask[..., :seen], scores.view(shape))
    torch.softmax(scores, -1, out=shares)
    result = torch.bmm(shares, value[:, :seen])
    if inputs.mask is not None:
        result.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0)
    return result.view(*leading, *result.shape[1:])


def _apply(mask: torch.Tensor, scores: torch.Tensor) -> None:
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), -math.inf)
    else:
        scores.add_(mask)


def _chunk_sizes(shape: torch.Size, most: int) -> tuple[int, int, int]:
    """Items, heads and queries of a chunk of at most `most` rows: whole heads and items where they fit."""
    items, heads, queries = shape
    if queries > most:
        return 1, 1, math.ceil(queries / math.ceil(queries / most))  # chunks of about equal size
    if queries * heads > most:
        return 1, most // queries, queries
    return min(items, most // (queries * heads)), heads, queries


def _spans(whole: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, whole)) for first in range(0, whole, size))


def _of_heads(part: torch.Tensor, heads: slice, count: int) -> torch.Tensor:
    """Keys or values for the query heads `heads` of `count`; each head of `part` serves consecutive query heads."""
    if part.shape[1] == count:
        return part[:, heads]
    groups = count // part.shape[1]
    return part[:, torch.arange(heads.start, heads.stop, device=part.device) // groups]


_PRODUCTS = (torch.bmm, torch.matmul, torch.Tensor.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__)


class Scores(torch.Tensor):
    """Lazy score matrix: `compute()` makes it when it is needed, but its product with values is `attend(values)`."""

    _compute: Callable[[], torch.Tensor]
    _attend: Callable[[torch.Tensor], torch.Tensor]
    _matrix: torch.Tensor | None

    @staticmethod
    def promise(
        shape: tuple[int, ...],
        like: torch.Tensor,
        compute: Callable[[], torch.Tensor],
        attend: Callable[[torch.Tensor], torch.Tensor],
    ) -> Scores:
        """Return lazy scores of `shape`, with the dtype and device of `like`."""
        scores: Scores = torch.Tensor._make_wrapper_subclass(Scores, shape, dtype=like.dtype, device=like.device)
        scores._compute, scores._attend, scores._matrix = compute, attend, None
        return scores

    def matrix(self) -> torch.Tensor:
        """Return the scores, computed on first use."""
        if self._matrix is None:
            self._matrix = self._compute()
        return self._matrix

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) == 2 and not kwargs and isinstance(args[0], Scores):
            scores, values = args
            if scores._matrix is None and not isinstance(values, Scores):  # a computed matrix may have been modified
                return scores._attend(values)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Scores, Scores.matrix, (args, kwargs or {}))
        return func(*args, **kwargs)
