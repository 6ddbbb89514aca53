"""The ways in which ranks may compute a call together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tightfit.schema.plan import ContextAttention

__all__ = ["RankOption", "rank_options"]


class RankOption(NamedTuple):
    """Fields of a Plan: in how many guidance groups ranks compute a call, and with which attention in each."""

    cfg_groups: int
    context_attention: ContextAttention


def rank_options(ranks: int, groups: Sequence[int], ways: Sequence[ContextAttention]) -> tuple[RankOption, ...]:
    """Return the options of so many `ranks`, by number of groups; groups of one rank have only the first of `ways`."""
    return tuple(RankOption(count, way) for count in groups for way in (ways if ranks > count else ways[:1]))
