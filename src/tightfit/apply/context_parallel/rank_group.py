"""The ranks of a process group, and what they send each other; every byte is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from tightfit.errors import RunError

__all__ = ["RankGroup"]


class RankGroup:
    """The ranks of a `torch.distributed` group (None: all of the process's default group), numbered from 0.

    Every method is collective: all ranks call it, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def exchange(self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send each tensor of `sent` to its rank and fill each of `received` from its rank; both may be empty.

        Between two ranks, tensors arrive in the order in which they are sent. They are contiguous.
        """
        self._started(sent, received)()

    def pass_on(self, tensor: torch.Tensor, coming: torch.Tensor) -> Callable[[], None]:
        """Start sending `tensor` to the next rank, and filling `coming` from the one before; return how to wait."""
        return self._started([((self.rank + 1) % self.size, tensor)], [((self.rank - 1) % self.size, coming)])

    def _started(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> Callable[[], None]:
        work = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in sent]
        work += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in received]
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sent)
        with _errors_named(self.rank):
            requests = dist.batch_isend_irecv(work) if work else []

        def wait() -> None:
            with _errors_named(self.rank):
                for request in requests:
                    request.wait()

        return wait

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous `tensor` of each rank, in their order; all have the same shape and dtype."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _errors_named(self.rank):
            dist.all_gather(found, tensor, group=self._group)
        self.bytes_sent += tensor.nbytes * (self.size - 1)
        return found

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with that of rank 0."""
        with _errors_named(self.rank):
            dist.broadcast(tensor, group=self._group, group_src=0)
        self.bytes_sent += 0 if self.rank else tensor.nbytes * (self.size - 1)

    def all_to_all(self, pieces: Mapping[int, torch.Tensor], shapes: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """Send `pieces[rank]` to each rank, and return what each sent here, in their order, of `shapes[rank]`."""
        own = pieces[self.rank]
        found = {other: own.new_empty(shapes[other]) for other in range(self.size) if other != self.rank}
        sent = [(other, piece.contiguous()) for other, piece in sorted(pieces.items()) if other != self.rank]
        self.exchange(sent, sorted(found.items()))
        return [own if other == self.rank else found[other] for other in range(self.size)]


@contextlib.contextmanager
def _errors_named(rank: int) -> Iterator[None]:
    """Turn the backend's errors into RunErrors: another rank is gone, or did not answer within the group's timeout."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = next(iter(str(error).strip().splitlines()), "")
        raise RunError(f"rank {rank}: another rank ended or does not answer: {said:.200}", rank=rank) from error
