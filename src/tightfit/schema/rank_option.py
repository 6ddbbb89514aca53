"""The ways in which ranks may compute a call together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tightfit.schema.plan import ContextAttention

__all__ = ["GROUPS", "RankOption", "rank_options"]

GROUPS = 2  # of ranks: one for the unconditional prediction of guidance, one for the conditional one


class RankOption(NamedTuple):
    """Fields of a Plan: in how many guidance groups ranks compute a call, and with which attention in each."""

    cfg_groups: int
    context_attention: ContextAttention


def rank_options(
    ranks: int, groups: int | None, context: int | None, ways: Sequence[ContextAttention]
) -> tuple[RankOption, ...]:
    """Return the options of so many `ranks`: in `groups` (None: one or two) of `context` ranks each (None: any number).

    There are none if that is another number of ranks. Groups of one rank have only the first of `ways`.
    """
    counts = [1, GROUPS] if groups is None else [groups]
    fitting = [count for count in counts if count * (context or ranks // count) == ranks]
    return tuple(RankOption(count, way) for count in fitting for way in (ways if ranks > count else ways[:1]))
