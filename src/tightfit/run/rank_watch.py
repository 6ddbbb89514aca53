"""Connections between ranks, through which each learns at once that another has ended, whatever it is doing then.

Rank 0 listens, the others connect to it, and it tells all of them. A system closes the connections of a process that is
killed, and reports those to a computer that does not answer any more, so a rank that only computes for long is not
taken for one that has ended.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from tightfit.errors import RunError
from tightfit.signals import before_end, end_process
from tightfit.sockets import received

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["BEGIN", "POLL", "RankWatch", "beginning"]

BEGIN = 60.0  # seconds within which all ranks have to begin: computers import torch at different speeds
OWN_END = 20.0  # seconds that a rank gets to end by itself after another had an error: often it has the same one
CONNECT = 10.0  # seconds
CALL = 1.0  # seconds that a call to rank 0 may take before torch is loaded: it is made again
POLL = 0.05  # seconds between two looks at whether a rank has begun
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # 25 s until a computer counts as gone
PORT, BEGUN = "tightfit/port", "tightfit/begun"  # keys of the store
ACCEPTED = b"tightfit"  # what rank 0 answers
ENDED, FAILED, DONE = b"E", b"F", b"D"  # messages, each followed by the rank as four digits


class RankWatch:
    """Ends this process, rank `rank` of `size`, with a line on stderr if another rank ends before rank 0 is done.

    `speaks` says whether this rank says the line where a certain one has ended; others end without a word.
    """

    def __init__(self, rank: int, size: int, speaks: Callable[[int], bool]) -> None:
        self._rank, self._size, self._speaks = rank, size, speaks
        self._sockets: dict[int, socket.socket] = {}  # by rank, as far as connected
        self._finished = threading.Event()  # rank 0 is done, or this rank has ended by itself
        self._heard = threading.Event()  # of a rank that has ended
        self._failed: int | None = None  # the rank that has said that it had an error
        self._sending = threading.RLock()  # a signal may come while it is held
        self._ending = threading.RLock()
        self._thread: threading.Thread | None = None
        self._place: tuple[int, str] | None = None  # rank 0: where it listens, and what others have to say there
        self._port: int | None = None  # others: that of rank 0, once it has told it
        self._calling: threading.Thread | None = None
        before_end.append(self.tell_failed)

    def begin_early(self, address: str, port: int, token: str) -> None:
        """Connect the ranks before torch is loaded, which takes seconds: at a `port` that each has worked out.

        Where that is taken or closed, `begin` connects them.
        """
        if self._rank == 0:
            with contextlib.suppress(OSError):
                self._listen(port, token)
            return
        self._calling = threading.Thread(target=lambda: self._call(address, port, token), name="rank call", daemon=True)
        self._calling.start()

    def _call(self, address: str, port: int, token: str) -> None:
        """Call rank 0 until it answers, however long that takes, or turns out to listen elsewhere."""

        def ends() -> bool:
            return self._finished.is_set() or self._port not in (None, port)

        while not ends():
            with contextlib.suppress(OSError):
                connection = socket.create_connection((address, port), timeout=CALL)
                if self._introduce(connection, token, ends):
                    return
            if self._port is not None:
                return
            time.sleep(POLL)

    def begin(self, store: Store, address: str) -> None:
        """Connect the ranks: rank 0 is at `address`. Raises RunError if a rank does not begin within BEGIN seconds."""
        if self._rank == 0:
            if self._place is None:
                self._listen(0, secrets.token_hex(16))
            assert self._place is not None
            store.set(PORT, " ".join(map(str, self._place)))
        else:
            self._wait(store, PORT, 0)
            port, token = store.get(PORT).decode().split()
            self._port = int(port)
            if self._calling is not None:
                self._calling.join()
            if not self._sockets:
                self._connect(address, self._port, token)
        store.set(f"{BEGUN}/{self._rank}", "")
        for rank in range(self._size):
            self._wait(store, f"{BEGUN}/{rank}", rank)

    def _wait(self, store: Store, key: str, rank: int) -> None:
        """Wait until `rank` has set `key`. The store's own way to wait would let no signal be handled meanwhile."""
        limit = time.monotonic() + BEGIN
        with beginning(f"rank {rank} of {self._size}", rank):
            while not store.check([key]):
                if time.monotonic() > limit:
                    raise RuntimeError(f"no {key} within {BEGIN:.0f} s")
                time.sleep(POLL)

    def finish(self) -> None:
        """Rank 0: tell the others that all is done. Others: wait for that; RunError where rank 0 had an error."""
        if self._rank == 0:
            self._finished.set()
            self._send(DONE, 0)
        elif self._thread is not None:
            while not self._finished.wait(0.05):
                if self._failed == 0:
                    raise self.error_of(0)
        self.close()

    def close(self) -> None:
        """Watch no more, as this rank ends by itself. If it ends because another one did, that is said first."""
        with contextlib.suppress(ValueError):
            before_end.remove(self.tell_failed)
        with self._ending:
            self._finished.set()

    def tell_failed(self) -> None:
        """Let the others know that this rank ends, and says why."""
        if not self._finished.is_set():
            self._send(FAILED, self._rank)

    def wait_for_news(self, seconds: float) -> int | None:
        """Return which rank had an error, if another one did. If one has ended without, this ends the process.

        Waits `seconds` at the most.
        """
        if self._thread is not None and self._heard.wait(seconds) and self._failed is None:
            self._thread.join(seconds)
        return self._failed

    def error_of(self, rank: int) -> RunError:
        """Return the error for a rank that had one."""
        message = f"rank {rank} of {self._size} ended with an error, which it says itself: all ranks end"
        return RunError(message, ended=rank, ended_by="another rank")

    # rank 0

    def _listen(self, port: int, token: str) -> None:
        """Serve the other ranks at a `port`, if 0 at one that is free. OSError if it is taken."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=self._size)
        self._place = server.getsockname()[1], token
        self._start(lambda: self._serve(server, token))

    def _serve(self, server: socket.socket, token: str) -> None:
        """Accept the other ranks, and tell all of them which one has ended."""
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not self._finished.is_set():
                for key, _ in selector.select(0.2):
                    if key.fileobj is server:
                        rank = self._accept(server, token)
                        if rank is not None:
                            selector.register(self._sockets[rank], selectors.EVENT_READ, rank)
                    else:
                        what = FAILED if received(self._sockets[key.data], 5) else ENDED
                        selector.unregister(key.fileobj)
                        self._send(what, key.data)
                        self._react(what, key.data)

    def _accept(self, server: socket.socket, token: str) -> int | None:
        """Return the rank that has connected; None if it was something else."""
        connection, _ = server.accept()
        connection.settimeout(CONNECT)
        said = received(connection, len(token) + 4).decode(errors="replace")
        if said[: len(token)] != token or not said[len(token) :].isdecimal():
            connection.close()
            return None
        _prepare(connection)
        with contextlib.suppress(OSError):
            connection.sendall(ACCEPTED)
        rank = int(said[len(token) :])
        with self._sending:
            self._sockets[rank] = connection
        return rank

    # others

    def _connect(self, address: str, port: int, token: str) -> None:
        """Follow rank 0, unless it is not to be reached there: a port may be closed, and gloo use another network."""
        limit = time.monotonic() + CONNECT
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), timeout=CONNECT)
            self._introduce(connection, token, lambda: time.monotonic() > limit)

    def _introduce(self, connection: socket.socket, token: str, ends: Callable[[], bool]) -> bool:
        """Follow rank 0 if it is what answers, before that `ends`; return whether it is."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.sendall(f"{token}{self._rank:04}".encode())
            while not select.select([connection], [], [], POLL)[0]:
                if ends():
                    return False
            if received(connection, len(ACCEPTED)) != ACCEPTED:
                return False
            _prepare(connection)
            stack.pop_all()
        self._sockets[0] = connection
        self._start(self._follow)
        return True

    def _follow(self) -> None:
        """Read what rank 0 says until it is done or has ended."""
        while not self._finished.is_set():
            said = received(self._sockets[0], 5)
            what, rank = (said[:1], int(said[1:])) if len(said) == 5 else (ENDED, 0)
            if what == DONE:
                self._finished.set()
            elif rank != self._rank:
                self._react(what, rank)

    # all

    def _start(self, target: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=target, name="rank watch", daemon=True)
        self._thread.start()

    def _send(self, what: bytes, rank: int) -> None:
        with self._sending:
            for connection in self._sockets.values():
                with contextlib.suppress(OSError):
                    connection.sendall(what + f"{rank:04}".encode())

    def _react(self, what: bytes, rank: int) -> None:
        """End this process because of `rank`, unless it ends by itself in time where that rank had an error."""
        if what == FAILED:
            self._failed = rank
        self._heard.set()
        if what == FAILED and self._finished.wait(OWN_END):
            return
        with self._ending:  # nobody else says anything from here on
            if not self._finished.is_set():
                self._end(what, rank)

    def _end(self, what: bytes, rank: int) -> NoReturn:
        before_end.remove(self.tell_failed)
        message = f"rank {rank} of {self._size} ended: it was killed, or its computer does not answer any more"
        if what == FAILED:
            message = str(self.error_of(rank))
        end_process(1, "RunError", message, silent=not self._speaks(rank))


@contextlib.contextmanager
def beginning(which: str, ended: int) -> Iterator[None]:
    """Turn a RuntimeError while the rank `ended`, named `which`, is waited for into a RunError that says so."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"{which} did not begin within {BEGIN:.0f} s: killed, or still loading torch; start all ranks again",
            ended=ended, ended_by="another rank",
        ) from error  # fmt: skip


def _prepare(connection: socket.socket) -> None:
    """Block without a timeout, and let the system see whether the other side's computer still answers."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
