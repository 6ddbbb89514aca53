"""This process as one of several that torchrun started: its process group, its card, and what it leaves to rank 0."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tightfit.errors import InputError

__all__ = ["ALONE", "LaunchedRank", "launched_rank", "rank_here"]


@dataclass(frozen=True)
class LaunchedRank:
    """This process's rank among `size`, and among those on this computer."""

    rank: int
    size: int
    local_rank: int

    @property
    def writes(self) -> bool:
        """Whether it writes files, and says what was done: only the first does."""
        return self.rank == 0

    def parallel(self, attention: str | None = None) -> dict[str, Any] | None:
        """Return the `parallel` of `fit`, with this kind of attention (None: the fastest)."""
        return {"context": self.size, "attention": attention or "auto"} if self.size > 1 else None

    def device(self, named: str | None) -> str | None:
        """Return the device of this rank: `named`, or of several cards the one with its number."""
        if self.size == 1 or named not in (None, "cuda"):
            return named
        from tightfit.devices.cuda_support import usable_cards  # imports torch

        cards = usable_cards()
        if not cards:
            return named
        if self.local_rank >= len(cards):
            raise InputError(
                f"{self.local_rank + 1} ranks or more run on this computer, which has {len(cards)} CUDA cards: "
                f"start torchrun with --nproc-per-node {len(cards)}, or give --device cpu", cards=len(cards),
            )  # fmt: skip
        return f"cuda:{cards[self.local_rank]}"

    def agreed(self, number: int) -> int:
        """Return the `number` of rank 0. Collective."""
        if self.size == 1:
            return number
        import torch
        import torch.distributed as dist

        told = torch.tensor(number)
        dist.broadcast(told, 0)
        return int(told)


ALONE = LaunchedRank(0, 1, 0)


@contextlib.contextmanager
def launched_rank() -> Iterator[LaunchedRank]:
    """Yield this process's rank, in a process group if there are others. Only the first one's stdout is shown."""
    own = _of_environment()
    if own.size == 1:
        yield own
        return
    import torch.distributed as dist

    from tightfit.devices.cuda_support import usable_cards

    if not dist.is_available():
        raise InputError(f"{own.size} ranks need torch.distributed, which this build of torch lacks", size=own.size)
    dist.init_process_group("cpu:gloo,cuda:nccl" if usable_cards() and dist.is_nccl_available() else "gloo")
    with contextlib.nullcontext() if own.writes else contextlib.redirect_stdout(io.StringIO()):
        yield own
    dist.destroy_process_group()


def rank_here() -> int:
    """Return this process's rank; 0 if torchrun did not start it."""
    return _of_environment().rank


def _of_environment() -> LaunchedRank:
    """Return what torchrun's variables say; ALONE if torchrun did not start this process."""
    said = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(text.isdecimal() for text in said):
        return ALONE
    rank, size, local_rank = map(int, said)
    return LaunchedRank(rank, size, local_rank) if size > 1 else ALONE
