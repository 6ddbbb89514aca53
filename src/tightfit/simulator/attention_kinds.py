"""Which of the kinds of attention a kernel is, where the card is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightfit.schema.attention import CUDNN_FIRST, AttentionCall, unsupported
from tightfit.schema.machine import Attending

__all__ = ["efficient_attention_kind"]


def efficient_attention_kind(args: Sequence[Any], capability: str | None) -> Attending:
    """Return the kind of a call of torch's memory-efficient attention with these `args`, on a card of `capability`.

    Without one, cards are possible on which torch tries cuDNN's attention first.
    """
    if capability is None:
        major, _, minor = CUDNN_FIRST[0].partition(".")
        if unsupported("cudnn", AttentionCall.of(*args[:4], capability=(int(major), int(minor)))) is None:
            return "cudnn-first-attention"
    return "efficient-attention"
