"""Ranks in two groups, each of which computes one of the two guidance predictions of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.simulated_ranks import SimulatedRankGroup
from tightfit.schema.rank_option import GROUPS
from tightfit.simulator.card import SimulatedCard

__all__ = ["GuidanceRanks"]


class GuidanceRanks:
    """Which guidance group this rank is in, `number`, and what it exchanges with whom.

    `rows` are the ranks of its group, which share the rows of networks; `branches` the two ranks of both groups that
    have the same share, in the order of the groups.
    """

    def __init__(self, number: int, rows: RankGroup, branches: RankGroup) -> None:
        self.number, self.rows, self.branches = number, rows, branches

    @classmethod
    def among(cls, group: RankGroup, context: int) -> GuidanceRanks:
        """Return those of `group`, whose ranks are in two groups of `context` ranks each, one after the other."""
        rows = [[number * context + share for share in range(context)] for number in range(GROUPS)]
        branches = [[number * context + share for number in range(GROUPS)] for share in range(context)]
        return cls(group.rank // context, group.part(rows), group.part(branches))

    def simulated(self, card: SimulatedCard) -> GuidanceRanks:
        """Return the same for this rank alone, on a simulated card."""
        rows, branches = (SimulatedRankGroup.like(each, card) for each in (self.rows, self.branches))
        return GuidanceRanks(self.number, rows, branches)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to others of its group, and to the other group."""
        return self.rows.bytes_sent + self.branches.bytes_sent

    def swap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send `tensors` to the other group, and return as many of the same sizes that came from it."""
        sent = [tensor.contiguous() for tensor in tensors]
        found = [torch.empty_like(tensor) for tensor in sent]
        other = 1 - self.number
        self.branches.exchange([(other, tensor) for tensor in sent], [(other, tensor) for tensor in found])
        return found
