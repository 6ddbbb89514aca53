"""Independent jobs, each done by a forked copy of this process, at the same time.

Measurements on simulated cards are Python code, of which threads run one at a time. A forked copy has the simulated
pipeline as it is, does its jobs and sends back their results. It may not use a real card, and computes in one thread,
as worker processes of torch's DataLoader do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import psutil
import torch

from tightfit.devices.ram import ram_free
from tightfit.signals import started

__all__ = ["begin", "both", "forking", "in_parallel"]

T = TypeVar("T")
S = TypeVar("S")

SPARE_BYTES = 2**29  # of RAM for each copy: what it changes it has for itself, which was at most 0.26 GB (Wan 2.1 1.3B)
PATIENCE = 5.0  # seconds without any computing after which a copy counts as stuck, unless it waits for a core
IDLE = 19  # niceness of work that may turn out not to be needed

_copies: ContextVar[contextlib.ExitStack | None] = ContextVar("_copies", default=None)  # ends them; None: no forking


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Let `in_parallel` and `begin` fork within the block, at whose end all copies end.

    Also on one core, as results may depend on what a process did before.
    """
    with contextlib.ExitStack() as undo, _set(undo if sys.platform == "linux" else None):
        yield


@contextlib.contextmanager
def _set(copies: contextlib.ExitStack | None) -> Iterator[None]:
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


def in_parallel(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of `jobs`, in their order; they must not depend on each other.

    This process does the first one, and a copy each of the others, whose results are pickled. What a copy does not
    return, because the job failed or the copy was stuck, is done here. Outside of `forking` and without spare memory,
    jobs are done one after another; so are those of a job.
    """
    if len(jobs) < 2 or not _may_fork(len(jobs) - 1):
        return [job() for job in jobs]
    with _set(None), contextlib.ExitStack() as undo:
        copies = [_ForkedJob(job, undo) for job in jobs[1:]]
        return [jobs[0](), *(copy.result() for copy in copies)]


def both(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """Return the results of two jobs, as `in_parallel` does."""
    jobs: list[Callable[[], Any]] = [first, second]
    one, other = in_parallel(jobs)
    return one, other


def begin(job: Callable[[], T]) -> Callable[[], T]:
    """Let a copy that only uses idle cores do `job`, and return a function that returns the result.

    Where `in_parallel` would not fork, it is the job itself.
    """
    undo = _copies.get()
    return job if undo is None or not _may_fork(1) else _ForkedJob(job, undo, nice=IDLE).result


def _may_fork(copies: int) -> bool:
    allowed = _copies.get() is not None and not multiprocessing.current_process().daemon
    return allowed and ram_free() >= copies * SPARE_BYTES


class _ForkedJob(Generic[T]):
    """A forked copy of this process, which does a job until `undo` is closed."""

    def __init__(self, job: Callable[[], T], undo: contextlib.ExitStack, *, nice: int = 0) -> None:
        context = multiprocessing.get_context("fork")
        self._job = job
        self._received, sent = context.Pipe(duplex=False)
        undo.callback(self._received.close)
        process = context.Process(target=_do, args=(job, sent, nice), daemon=True)
        with sent, contextlib.suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: other threads may hold locks
            process.start()
            self._watched = psutil.Process(process.pid)
            started.append(self._watched)
            undo.callback(started.remove, self._watched)
            undo.callback(process.join)
            undo.callback(process.kill)

    def result(self) -> T:
        """Return what the job does, as soon as it is done."""
        with contextlib.suppress(EOFError, OSError, psutil.Error):
            before = None
            while not self._received.poll(PATIENCE):
                computed, waits = self._watched.cpu_times()[:2], self._watched.status() != psutil.STATUS_RUNNING
                if computed == before and waits:  # for a lock, say, that another thread of this process held
                    return self._job()
                before = computed
            found: T = self._received.recv()
            return found
        return self._job()


def _do(job: Callable[[], Any], sent: Connection, nice: int) -> None:
    """Do the job of a forked copy."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the first process ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(nice)
    torch.set_num_threads(1)  # the others are not copied
    with contextlib.suppress(Exception):  # the first process does it again, and raises
        sent.send(job())
