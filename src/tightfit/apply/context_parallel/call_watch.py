"""What notices that another rank left a call or ended, where NCCL does not: its kernels wait until they are aborted."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tightfit.devices.ram import computer_mark
from tightfit.errors import RunError
from tightfit.sockets import received

__all__ = ["CallWatch", "abort_nccl", "nccl_of", "new_call_group", "watch_of_default_group"]

GRACE = 5.0  # seconds that a call may go on after a rank's process ended: it may have ended after its own last call
STARTING = 10.0  # seconds that an abort waits while operations are started, where memory is freed: that waits, too
CONNECT = 60.0  # seconds within which ranks reach each other
NUMBER = 8  # bytes of the number of a call, or of a rank
SETTINGS = {  # of torch's threads, for groups of calls
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # on errors they abort the communicator, and not the process
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",  # a quarter of how long they wait before
}


class CallWatch:
    """A thread that is told when other ranks of the default process group leave a call, or end.

    It has a connection to each. Calls are numbered by the groups that are made for them, alike on all ranks.
    Collective: all ranks make one together. Raises RunError where they cannot reach each other.
    """

    def __init__(self, gather: Callable[[str], list[str]]) -> None:
        """`gather` returns the texts of all ranks, in their order."""
        self._rank = dist.get_rank()
        self._lock = threading.Lock()
        self._number, self._watched = 0, list[dist.ProcessGroup]()
        self._culprit: int | None = None
        self._connections = _connected(self._rank, gather)
        threading.Thread(target=self._listen, daemon=True, name="tightfit-ranks").start()

    @contextlib.contextmanager
    def starting(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Start operations of `group` within this: no abort comes between. Raises RuntimeError after an abort."""
        with self._lock:
            self.check()
            try:
                yield
            except BaseException:
                _end_nccl_group(group)
                raise

    def check(self) -> None:
        """Raise RuntimeError if a rank has left the current call: the card then goes on with any values."""
        if self._culprit is not None:
            raise RuntimeError(f"rank {self._culprit} left the call")

    def begin(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Watch over new groups, of which none was left yet."""
        with self._lock:
            self._number += 1
            self._watched, self._culprit = list(groups), None

    def leave(self) -> None:
        """Tell the other ranks that this one is no longer in its groups."""
        with self._lock:
            self._watched = []
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has ended
                connection.sendall(self._number.to_bytes(NUMBER))

    def close(self) -> None:
        """Close the connections, which ends the thread, here and on the other ranks."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as ready:
            for rank, connection in self._connections.items():
                ready.register(connection, selectors.EVENT_READ, rank)
            while ready.get_map():
                for key, _ in ready.select():
                    said = received(self._connections[key.data], NUMBER)
                    if len(said) < NUMBER:  # it has ended
                        ready.unregister(key.fileobj)
                        threading.Timer(GRACE, self._abort, (key.data, self._number)).start()
                    else:
                        self._abort(key.data, int.from_bytes(said))

    def _abort(self, rank: int, number: int) -> None:
        free = self._lock.acquire(timeout=STARTING)
        try:
            watched = self._watched if number == self._number else []
            if watched:
                self._culprit = rank
            for group in watched:
                abort_nccl(group)
        finally:
            if free:
                self._lock.release()


def _connected(rank: int, gather: Callable[[str], list[str]]) -> dict[int, socket.socket]:
    """Return a connection to each other rank. Collective."""
    host, own, token = socket.gethostname(), computer_mark(), secrets.token_hex(16)
    found = dict[int, socket.socket]()
    with socket.create_server(("", 0)) as server:
        server.settimeout(CONNECT)
        told = [text.split() for text in gather(f"{host} {server.getsockname()[1]} {token} {own}")]
        for other, (its_host, port, its_token, computer) in enumerate(told[:rank]):
            address = ("127.0.0.1" if computer == own else its_host, int(port))
            try:
                found[other] = socket.create_connection(address, CONNECT)
                found[other].sendall(its_token.encode() + rank.to_bytes(NUMBER))
            except OSError as error:
                raise RunError(f"rank {rank} cannot reach rank {other} at {address[0]}:{port}: {error}") from None
        while len(found) < len(told) - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(len(told))) - set(found) - {rank})
                raise RunError(f"ranks {missing} do not reach rank {rank} at {host} within {CONNECT:.0f} s") from None
            connection.settimeout(CONNECT)
            greeting = received(connection, len(token) + NUMBER)
            if secrets.compare_digest(greeting[:-NUMBER], token.encode()):
                found[int.from_bytes(greeting[-NUMBER:])] = connection
            else:
                connection.close()
    for connection in found.values():
        connection.settimeout(None)
    return found


_WATCHES: dict[dist.ProcessGroup, CallWatch] = {}  # the one of the default group that is running


def watch_of_default_group(gather: Callable[[str], list[str]]) -> CallWatch | None:
    """Return the watch over the ranks, made at the first call; None if they use no NCCL. Collective."""
    default = dist.distributed_c10d._get_default_group()
    if nccl_of(default) is None:
        return None
    if default not in _WATCHES:
        for earlier in _WATCHES.values():
            earlier.close()
        _WATCHES.clear()
        _WATCHES[default] = CallWatch(gather)
    return _WATCHES[default]


def nccl_of(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend by which `group` sends tensors of cards; None if it has no such."""
    if not dist.is_nccl_available() or torch.device("cuda") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cuda"))
    return backend if type(backend).__name__.startswith("ProcessGroupNCCL") else None  # torch 2.15's ends in 2


def abort_nccl(group: dist.ProcessGroup) -> None:
    """End whatever the card waits for in `group`; its tensors then have any values."""
    if (backend := nccl_of(group)) is not None:
        with contextlib.suppress(RuntimeError):
            backend.abort()


def _end_nccl_group(group: dist.ProcessGroup | None) -> None:
    """End the NCCL group call that an error of batch_isend_irecv leaves open: later calls would be part of it."""
    backend = None if group is None else nccl_of(group)
    if backend is not None and hasattr(backend, "_group_end"):  # torch 2.15's backend has no such
        with contextlib.suppress(RuntimeError):  # there is none
            backend._group_end()


def new_call_group(ranks: list[int] | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a new process group, of which errors end calls and not the process. Collective."""
    with _environment(SETTINGS):
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
        return group


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """With these variables, where the user has not set them."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
