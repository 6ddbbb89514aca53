"""A rank of a process group that exists only on a simulated card: it exchanges bytes with ranks that nobody runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost

__all__ = ["SimulatedRankGroup"]


class SimulatedRankGroup(RankGroup):
    """Rank `rank` of `size`, on `card`, whose clock every exchange takes. What is received has no values."""

    def __init__(self, rank: int, size: int, card: SimulatedCard) -> None:
        self.rank, self.size, self.bytes_sent = rank, size, 0
        self._card = card

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        yield

    def check_same(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.all_gather(self._sums(tensors))

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is: it is some random generator's state, on the CPU."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        self._exchanged(tensor.dtype, tensor.nbytes * (self.size - 1), tensor.nbytes * (self.size - 1))
        return found

    def _started(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> Callable[[], None]:
        tensors = [tensor for _, tensor in (*sent, *received)]
        if tensors:
            counts = (sum(tensor.nbytes for _, tensor in each) for each in (sent, received))
            self._exchanged(tensors[0].dtype, *counts)
        return lambda: None

    def _exchanged(self, dtype: torch.dtype, sent: int, received: int) -> None:
        self.bytes_sent += sent
        self._card.run_kernel(KernelCost("exchange", dtype, 0, max(sent, received)))
