"""A rank of a process group that exists only on a simulated card: it exchanges bytes with ranks that nobody runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.schema.machine import Amounts, Exchange
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost

__all__ = ["SimulatedRankGroup"]


class SimulatedRankGroup(RankGroup):
    """Rank `rank` of `size`, of which `per_node` consecutive ones are on one computer. What is received has no values.

    Exchanges take the clock of `card`; without one, this says only which rank is meant. A computer's link to others
    carries what `on_link` cards send at the same time (None: those of the group).
    """

    def __init__(
        self, rank: int, size: int, per_node: int | None = None, card: SimulatedCard | None = None,
        on_link: int | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.per_node, self.bytes_sent = rank, size, per_node or size, 0
        self.on_link, self._card = on_link or self.per_node, card

    @classmethod
    def like(cls, group: RankGroup, card: SimulatedCard) -> SimulatedRankGroup:
        """Return the rank of `group`, on `card`."""
        on_link = group.on_link if isinstance(group, SimulatedRankGroup) else None
        return cls(group.rank, group.size, group.per_node, card, on_link)

    def part(self, partition: Sequence[Sequence[int]]) -> SimulatedRankGroup:
        (own,) = (ranks for ranks in partition if self.rank in ranks)
        here = sum(self._is_here(rank) for rank in own)
        return SimulatedRankGroup(own.index(self.rank), len(own), here, self._card, self.on_link)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        yield

    def check_same(self, name: str, tensors: Sequence[torch.Tensor], did: str = "") -> None:
        self.all_gather(self._sums(tensors))

    def are_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return True: they have no values."""
        return True

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is: it is some random generator's state, on the CPU."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        others = [(rank, tensor) for rank in range(self.size) if rank != self.rank]
        self._started(others, others)()
        return found

    def pass_on(self, tensor: torch.Tensor, coming: torch.Tensor) -> Callable[[], None]:
        (after, before), crossing = (
            ((self.rank + 1) % self.size, (self.rank - 1) % self.size),
            self.per_node < self.size,
        )
        crossing = crossing and not (self._is_here(after) and self._is_here(before))
        self.bytes_sent += tensor.nbytes
        size = max(tensor.nbytes, coming.nbytes)  # of each computer, one rank sends to another at a time
        return self._card_in_use.run_beside(
            KernelCost("network-ring" if crossing else "ring", tensor.dtype, Amounts(0, size))
        )

    def _started(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> Callable[[], None]:
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sent)
        kinds: tuple[tuple[Exchange, bool, int], ...] = (("exchange", True, 1), ("network", False, self.on_link))
        for kind, here, cards in kinds:
            ways = [[tensor for rank, tensor in way if self._is_here(rank) == here] for way in (sent, received)]
            if tensors := [*ways[0], *ways[1]]:
                size = max(sum(tensor.nbytes for tensor in way) for way in ways)
                self._card_in_use.run_kernel(KernelCost(kind, tensors[0].dtype, Amounts(0, size * cards)))
        return lambda: None

    def _is_here(self, rank: int) -> bool:
        """Whether another rank is on the same computer."""
        return rank // self.per_node == self.rank // self.per_node

    @property
    def _card_in_use(self) -> SimulatedCard:
        assert self._card is not None, "this rank is on no card"
        return self._card
