"""This process as one of several that torchrun started: its process group, its card, and what it leaves to rank 0."""

from __future__ import annotations

import contextlib
import hashlib
import io
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from tightfit.errors import InputError, RunError
from tightfit.run.rank_watch import BEGIN, POLL, RankWatch, beginning

__all__ = ["ALONE", "LaunchedRank", "launched_rank", "rank_here"]

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

INTERFACE = "GLOO_SOCKET_IFNAME"
FIRST_PORT, PORTS = 10_240, 20_000  # ports of which rank 0 listens at one before torch is loaded
NEWS = 2.0  # seconds in which a rank whose exchange failed hears which other rank has ended


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

    def speaks_after(self, ended: int | None) -> bool:
        """Whether it says that the rank `ended` did: of a computer's ranks, the first one that has not ended does."""
        first_here = self.rank - self.local_rank
        return self.local_rank == (1 if ended == first_here else 0)

    def parallel(self, attention: str | None = None, groups: int | None = None) -> dict[str, Any] | None:
        """Return the `parallel` of `fit`, with this kind of attention, in so many groups (None: the fastest)."""
        return {"cfg": groups or "auto", "attention": attention or "auto"} if self.size > 1 else None

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

        from tightfit.apply.context_parallel.rank_group import backend_errors_named

        told = torch.tensor(number)
        with backend_errors_named(self.rank):
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
    watch = RankWatch(own.rank, own.size, own.speaks_after)
    try:
        watch.begin_early(os.environ["MASTER_ADDR"], *_early_place(own.size))
        import torch.distributed as dist

        if not dist.is_available():
            raise InputError(f"{own.size} ranks need torch.distributed, which this build of torch lacks", size=own.size)
        _join(own, watch)
        with contextlib.nullcontext() if own.writes else contextlib.redirect_stdout(io.StringIO()):
            yield own
        watch.finish()
    except RunError as error:
        if error.facts.get("ended_by") and "ended" not in error.facts:  # who it was is not known
            if (failed := watch.wait_for_news(NEWS)) is not None:  # if a rank was killed, this process ends there
                raise watch.error_of(failed) from error
            del error.facts["ended_by"]  # it is the first one: it says its error, and the others hear of it
        watch.tell_failed()
        raise
    except BaseException:
        watch.tell_failed()
        raise
    finally:
        watch.close()
    dist.destroy_process_group()


def _early_place(size: int) -> tuple[int, str]:
    """Return the port at which rank 0 listens before torch is loaded, and what the others say there.

    Each rank works both out from torchrun's variables. The port is below those that systems choose for connections,
    and not the one after torchrun's, which users give to their next run.
    """
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    run = " ".join([*(os.environ.get(name, "") for name in names), str(size)])
    token = hashlib.sha256(run.encode()).hexdigest()[:32]
    return FIRST_PORT + int(token, 16) % PORTS, token


def _join(own: LaunchedRank, watch: RankWatch) -> None:
    """Make the process group of all ranks, which are watched from here on. Raises RunError if one does not begin.

    gloo's connections are made rank by rank: a rank that is done at once would close its own while others still
    connect, which would take that for a failure. So each waits until all are connected.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from tightfit.apply.context_parallel.rank_group import backend_errors_named
    from tightfit.devices.cuda_support import usable_cards

    store = _connected_store(own)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    watch.begin(PrefixStore(f"tightfit/{attempt}", store), os.environ["MASTER_ADDR"])
    store.set_timeout(dist.default_pg_timeout)
    _name_interface(os.environ["MASTER_ADDR"])
    backend = "cpu:gloo,cuda:nccl" if usable_cards() and dist.is_nccl_available() else "gloo"
    with backend_errors_named(own.rank):
        dist.init_process_group(backend, store=PrefixStore("default_pg", store), rank=own.rank, world_size=own.size)
        dist.all_reduce(torch.zeros(1))  # on the CPU, and so by gloo


def _connected_store(own: LaunchedRank) -> Store:
    """Return torch's store of all ranks, as torchrun's agent or rank 0 has it. RunError if it is not there in time.

    Its own way to connect may take three times the seconds that it is given, and lets no signal be handled meanwhile.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = own.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = time.monotonic() + BEGIN
    with beginning(f"rank 0 of {own.size}", 0):
        while not (hosts or _answers(address, port)):
            if time.monotonic() > limit:
                raise RuntimeError(f"nothing listens at {address}:{port}")
            time.sleep(POLL)
        seconds = timedelta(seconds=BEGIN)
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, own.size, hosts, seconds, wait_for_workers=False, multi_tenant=True
        )


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def _name_interface(address: str) -> None:
    """Let gloo use the network interface that leads to `address`, unless the user names one, or all is on one computer.

    Gloo would take the one that this computer's own name leads to, which is often that of the computer alone.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] or INTERFACE in os.environ:
        return
    with contextlib.suppress(OSError):
        family, *_, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(there)  # sends nothing
            own = ipaddress.ip_address(asking.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if not own.is_loopback and str(own) in (each.address.partition("%")[0] for each in addresses):
                os.environ[INTERFACE] = name


def rank_here() -> LaunchedRank:
    """Return this process's rank; ALONE if torchrun did not start it, or no other one."""
    return _of_environment()


def _of_environment() -> LaunchedRank:
    """Return what torchrun's variables say; ALONE if torchrun did not start this process."""
    said = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(text.isdecimal() for text in said):
        return ALONE
    rank, size, local_rank = map(int, said)
    return LaunchedRank(rank, size, local_rank) if size > 1 else ALONE
