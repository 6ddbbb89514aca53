"""Attention scores that nobody has computed yet: they become attention when they meet the values.

diffusers' older processors ask `attn.get_attention_scores(query, key, mask)` for the share of each key in each query,
and multiply that by the values. What they are given here stands for that matrix. Multiplied by values, it is one call
of attention, which never makes the matrix; anything else that is done with it makes it first (a processor that
stores the shares, or changes them, works as before).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["Scores"]

_PRODUCTS = (torch.bmm, torch.matmul, torch.Tensor.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__)


class Scores(torch.Tensor):
    """The matrix that `compute()` makes; its product with values is `attend(values)`."""

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
        """Scores of `shape`, in the dtype and on the device of `like`."""
        scores: Scores = torch.Tensor._make_wrapper_subclass(Scores, shape, dtype=like.dtype, device=like.device)
        scores._compute, scores._attend, scores._matrix = compute, attend, None
        return scores

    def matrix(self) -> torch.Tensor:
        """The scores themselves, made at the first time of asking."""
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
            if scores._matrix is None and not isinstance(values, Scores):  # once made, they may have been changed
                return scores._attend(values)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Scores, Scores.matrix, (args, kwargs or {}))
        return func(*args, **kwargs)
