"""The ranks of a process group, and what they send each other; every byte is counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from tightfit.apply.context_parallel.call_watch import CallWatch, abort_nccl, new_call_group, watch_of_default_group
from tightfit.errors import RunError

__all__ = ["ExchangeRates", "RankGroup", "RankGroupPart", "backend_errors_named"]


CONFIRMED = 7.0  # what ranks send each other's cards at the end of a call
TRIES, LARGE = 4, 4 * 2**20  # how often an exchange is timed, and the bytes of a large one


class ExchangeRates(NamedTuple):
    """What it takes to send to another rank while receiving as much."""

    rate: float  # bytes per second
    latency: float  # seconds of an exchange, however small


class RankGroup:
    """The ranks of torch.distributed's default process group, numbered from 0, and their calls.

    Every method is collective: all ranks call it, in the same order. What they send each other in a call goes through a
    group of its own. A rank whose call fails leaves that group, which ends the others' calls, too: whoever waits for a
    rank that has left gets an error. The next call begins with a new one.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.per_node = self.size  # consecutive ranks on a computer, as far as simulated exchanges ask
        self.bytes_sent = 0
        self.ranks_here = 1  # on this computer, as far as `WeightSharing.among` was called
        self._group: dist.ProcessGroup | None = None  # of calls, from the first one on
        self._calling = False
        self._pending: list[list[dist.Work]] = []  # sends and receives that were started and not waited for
        self._parts: list[RankGroupPart] = []
        self._watch: CallWatch | None = None
        self._sent_from: torch.device | None = None  # from which something was sent in this call

    def part(self, partition: Sequence[Sequence[int]]) -> RankGroup:
        """Return the group of the ranks in that element of `partition` which has this one; numbered from 0.

        Every rank asks for the same partitions, in the same order.
        """
        self._parts.append(found := RankGroupPart(self, partition))
        return found

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Send and receive within this; calls within a call are part of it. Raises RunError where a rank is gone."""
        if self._calling:
            yield
            return
        self._join()
        self._calling = True
        try:
            yield
            for group in (self, *self._parts):
                group.confirm()
        except BaseException:
            self._leave()
            raise
        finally:
            self._calling = False

    def _join(self) -> None:
        """Make a new group if a rank has none."""
        missing = torch.tensor(int(self._group is None))
        with backend_errors_named(self.rank):
            dist.all_reduce(missing)
            if missing.item():
                self._leave()
                self._watch = watch_of_default_group(self.all_gather_text)
                self._group = new_call_group(None, _default_timeout())
                for part in self._parts:
                    part.join(self._watch)
                if self._watch is not None:
                    groups = (group._group for group in (self, *self._parts))
                    self._watch.begin([group for group in groups if group is not None])

    def confirm(self) -> None:
        """Wait until the card has sent and received everything; raises RunError if that was aborted.

        Without it a call could end before its card has received what another rank never sends.
        """
        card, self._sent_from = self._sent_from, None
        if card is None or self._watch is None:
            return
        own = torch.full((1,), CONFIRMED, device=card)
        found = [torch.zeros_like(own) for _ in range(self.size)]
        with self._errors():
            dist.all_gather(found, own, group=self._group)
        if any(its.item() != CONFIRMED for its in found):
            with self._errors():
                raise RuntimeError("its card's communicator was aborted")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        watched = contextlib.nullcontext() if self._watch is None else self._watch.starting(self._group)
        with backend_errors_named(self.rank), watched:
            yield

    def _leave(self) -> None:
        """Close the connections of the group: they are closed when nothing refers to them any more."""
        self._sent_from = None
        if self._watch is not None and self._group is not None:
            self._watch.leave()
        for part in self._parts:
            part.leave()
        for requests in self._pending:
            requests.clear()
        self._pending.clear()
        if self._group is not None:
            group, self._group = self._group, None
            abort_nccl(group)
            dist.destroy_process_group(group)

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
        requests: list[dist.Work] = []
        self._pending.append(requests)
        try:
            with self._errors():
                requests += dist.batch_isend_irecv(work) if work else []
        finally:
            work.clear()  # an error that is handled keeps this frame, which must not keep the connections

        def wait() -> None:
            with self._errors():
                while requests:
                    requests.pop(0).wait()
            self._pending.remove(requests)

        return wait

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous `tensor` of each rank, in their order; all have the same shape and dtype."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._errors():
            dist.all_gather(found, tensor, group=self._group)
        if tensor.device.type == "cuda":
            self._sent_from = tensor.device
        self.bytes_sent += tensor.nbytes * (self.size - 1)
        return found

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the `data` of each rank, of any length."""
        sizes = [int(each) for each in self.all_gather(torch.tensor(len(data)))]
        if not any(sizes):
            return [b"" for _ in sizes]
        sent = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        found = self.all_gather(sent)
        return [bytes(each[:size].tolist()) for each, size in zip(found, sizes, strict=True)]

    def all_gather_text(self, text: str) -> list[str]:
        """Return the `text` of each rank."""
        return [data.decode() for data in self.all_gather_bytes(text.encode())]

    def exchange_rates(self, device: torch.device, wait: Callable[[], None]) -> ExchangeRates:
        """Measure what it takes to send to the next rank from `device`, for which `wait` waits: the best of a few."""
        seconds = [min(self._timed(device, size, wait) for _ in range(TRIES)) for size in (1, LARGE)]
        return ExchangeRates(LARGE / max(seconds[1] - seconds[0], 1e-9), seconds[0])

    def _timed(self, device: torch.device, size: int, wait: Callable[[], None]) -> float:
        tensor, coming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        self.all_gather(torch.zeros(1))  # begin together
        wait()
        began = time.perf_counter()
        self.pass_on(tensor, coming)()
        wait()
        return time.perf_counter() - began

    def check_same(self, name: str, tensors: Sequence[torch.Tensor], did: str = "was called with other values") -> None:
        """Raise RunError if ranks give the component `name` different inputs: each must be given the same call.

        `did` says in the error what another rank did.
        """
        own = self._sums(tensors)
        for rank, its in enumerate(self.all_gather(own)):
            if not self.are_same(its, own):
                self.confirm()  # all ranks are here: each has seen that one differs
                raise RunError(
                    f"{name}: rank {rank} {did} than rank {self.rank}: "
                    "give every rank the same arguments, and a generator with the same seed",
                    name=name, rank=rank,
                )  # fmt: skip

    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one number of all `tensors`, to be compared by `check_same`."""
        sums = self._sums(tensors)
        return (sums * torch.arange(1, len(sums) + 1, dtype=sums.dtype, device=sums.device)).sum()

    def are_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two sums, or two digests, are equal."""
        return torch.equal(one.nan_to_num(), other.nan_to_num())

    def _sums(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([tensor.double().sum().to(tensors[0].device) for tensor in tensors])

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with that of rank 0."""
        with self._errors():
            dist.broadcast(tensor, group=self._group, group_src=0)
        self.bytes_sent += 0 if self.rank else tensor.nbytes * (self.size - 1)

    def all_to_all(self, pieces: Mapping[int, torch.Tensor], shapes: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """Send `pieces[rank]` to each rank, and return what each sent here, in their order, of `shapes[rank]`."""
        own = pieces[self.rank]
        found = {other: own.new_empty(shapes[other]) for other in range(self.size) if other != self.rank}
        sent = [(other, piece.contiguous()) for other, piece in sorted(pieces.items()) if other != self.rank]
        self.exchange(sent, sorted(found.items()))
        return [own if other == self.rank else found[other] for other in range(self.size)]


class RankGroupPart(RankGroup):
    """Some ranks of the group `whole`, with a process group of their own, which is made and left with that of `whole`.

    What is sent in a call goes through it; calls are those of `whole`.
    """

    def __init__(self, whole: RankGroup, partition: Sequence[Sequence[int]]) -> None:
        (own,) = (ranks for ranks in partition if whole.rank in ranks)
        self.rank, self.size, self.bytes_sent = own.index(whole.rank), len(own), 0
        self.per_node = self.size
        self._whole, self._partition, self._own = whole, partition, own
        self._group: dist.ProcessGroup | None = None
        self._pending: list[list[dist.Work]] = []
        self._parts: list[RankGroupPart] = []
        self._watch: CallWatch | None = None
        self._sent_from: torch.device | None = None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        with self._whole.call():
            yield

    def join(self, watch: CallWatch | None) -> None:
        """Make the process groups of all parts, as all ranks do together; `watch` is over them."""
        self._watch = watch
        for ranks in self._partition:
            group = new_call_group(list(ranks), _default_timeout())
            if ranks is self._own:
                self._group = group

    def leave(self) -> None:
        """Close the connections of this part's process group."""
        self._watch = None  # the whole group tells the other ranks
        self._leave()


@contextlib.contextmanager
def backend_errors_named(rank: int) -> Iterator[None]:
    """Turn the backend's errors into RunErrors: another rank is gone, or did not answer within the group's timeout."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = next(iter(str(error).strip().splitlines()), "")
        message = f"rank {rank}: another rank ended or does not answer: {said:.200}"
        bare = error.with_traceback(None)  # its frames would keep the connections
        raise RunError(message, rank=rank, ended_by="another rank") from bare


def _default_timeout() -> timedelta | None:
    """Return the timeout that the default group was made with; None if this version of torch does not say it."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)
