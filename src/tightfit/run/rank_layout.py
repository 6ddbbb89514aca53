"""Options on several cards → how many ranks there are, and on which computers. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from tightfit.errors import PlanError
from tightfit.units import parse_rate

__all__ = ["RankLayout", "rank_layout"]

MOST = 1024  # ranks


class RankLayout(NamedTuple):
    """`nodes` computers with `per_node` cards each, of which every one is a rank."""

    per_node: int
    nodes: int = 1
    link_rate: float | None = None  # bytes per second each way between a computer and the others; None: only one

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    @property
    def described(self) -> str:
        return f"{self.nodes} computers with {self.per_node}" if self.nodes > 1 else str(self.per_node)


def rank_layout(per_node: int | None, nodes: int | None, link: str | None) -> RankLayout | None:
    """Return the layout of --cards-per-node, --nodes and --link; None where that is one card. PlanError if impossible.

    `link` is a rate such as "100Gbit"; it is needed for several nodes.
    """
    for name, count in (("cards-per-node", per_node), ("nodes", nodes)):
        if count is not None and count < 1:
            raise PlanError(f"--{name} {count}: there is at least one", **{name.replace("-", "_"): count})
    layout = RankLayout(per_node or 1, nodes or 1, None if link is None else parse_rate(link))
    if layout.ranks > MOST:
        raise PlanError(f"{layout.ranks:,} cards are too many: {MOST:,} at the most", ranks=layout.ranks)
    if layout.nodes > 1 and link is None:
        raise PlanError(f"--nodes {nodes} needs the rate between them, e.g. --link 100Gbit", nodes=nodes)
    if layout.nodes == 1 and link is not None:
        raise PlanError(f"--link {link} is between computers: say --nodes, too", link=link)
    return layout if layout.ranks > 1 else None
