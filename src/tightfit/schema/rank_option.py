"""The ways in which ranks may compute a call together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tightfit.schema.plan import ContextAttention
from tightfit.schema.vae_plan import VaePlan

__all__ = ["AUTOENCODERS_AT_ONCE", "GROUPS", "AutoencoderSharing", "RankOption", "rank_options"]

GROUPS = 2  # of ranks: one for the unconditional prediction of guidance, one for the conditional one


class RankOption(NamedTuple):
    """Fields of a Plan: in how many guidance groups ranks compute a call, and with which attention in each."""

    cfg_groups: int
    context_attention: ContextAttention


class AutoencoderSharing(NamedTuple):
    """How ranks share an autoencoder."""

    shared: bool = True  # whether each computes a share of its rows; else all of them
    strips: int | None = None  # bytes for strips of a rank's share; None: the whole share at once

    @classmethod
    def of(cls, vae: VaePlan) -> AutoencoderSharing:
        return cls(vae.shared, vae.strips if vae.shared else None)

    @property
    def fields(self) -> dict[str, Any]:
        """Its fields of a VaePlan; which strips each rank has of what is not shared, is planned by each."""
        return {"shared": self.shared} | ({} if self.strips is None else {"strips": self.strips})


AUTOENCODERS_AT_ONCE = AutoencoderSharing()


def rank_options(
    ranks: int, groups: int | None, context: int | None, ways: Sequence[ContextAttention]
) -> tuple[RankOption, ...]:
    """Return the options of so many `ranks`: in `groups` (None: one or two) of `context` ranks each (None: any number).

    There are none if that is another number of ranks. Groups of one rank have only the first of `ways`.
    """
    counts = [1, GROUPS] if groups is None else [groups]
    fitting = [count for count in counts if count * (context or ranks // count) == ranks]
    return tuple(RankOption(count, way) for count in fitting for way in (ways if ranks > count else ways[:1]))
