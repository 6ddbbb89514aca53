"""Jobs of forked copies: their results, and what happens to those that fail, die or are stuck."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tightfit.measure import forked_work
from tightfit.measure.forked_work import begin, both, forking, in_parallel
from tightfit.signals import started

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only"),
    pytest.mark.usefixtures("copies"),
]


def test_each_job_but_the_first_has_a_process_of_its_own() -> None:
    with forking():
        first, *others = in_parallel([os.getpid] * 4)
    assert first == os.getpid()
    assert len({first, *others}) == 4
    assert not started


def test_results_are_in_order() -> None:
    def late(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    with forking():
        assert in_parallel([partial(late, each) for each in (0.2, 0.1, 0.0)]) == [0.2, 0.1, 0.0]
        assert both(lambda: "one", lambda: 2) == ("one", 2)
        assert in_parallel([]) == []


def test_outside_of_forking_and_without_memory_this_process_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(in_parallel([os.getpid] * 3)) == {os.getpid()}
    assert begin(os.getpid)() == os.getpid()
    with forking():
        assert begin(os.getpid)() != os.getpid()
        monkeypatch.setattr(forked_work, "ram_free", lambda: 2**20)
        assert set(in_parallel([os.getpid] * 3)) == {os.getpid()}
        assert begin(os.getpid)() == os.getpid()


def test_other_threads_fork_too() -> None:
    found: list[int] = []

    def work() -> None:
        with forking():
            found.extend(in_parallel([os.getpid] * 2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == os.getpid() != found[1]


def test_jobs_of_a_job_are_done_one_after_another() -> None:
    with forking():
        for owner, *others in in_parallel([lambda: [os.getpid(), *in_parallel([os.getpid] * 2)]] * 2):
            assert others == [owner, owner]


def test_what_a_copy_fails_at_is_done_here() -> None:
    own = os.getpid()

    def fails_elsewhere() -> int:
        if os.getpid() != own:
            raise ValueError("here")
        return own

    def fails() -> int:
        raise ValueError("everywhere")

    with forking():
        assert in_parallel([int, fails_elsewhere, partial(os.cpu_count)])[1] == own
        with pytest.raises(ValueError, match="everywhere"):
            in_parallel([int, fails])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_copy_leaves_is_done_here(number: signal.Signals) -> None:
    own = os.getpid()

    def dies_elsewhere() -> int:
        if os.getpid() != own:
            os.kill(os.getpid(), number)
        return own

    with forking():
        assert in_parallel([int, dies_elsewhere]) == [0, own]


def test_what_a_stuck_copy_leaves_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread holds a lock at the fork, so in the copy nobody ever releases it."""
    monkeypatch.setattr(forked_work, "PATIENCE", 0.2)
    lock, forked = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            forked.wait()

    def locked() -> int:
        with lock:
            return os.getpid()

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with forking():
        assert in_parallel([forked.set, locked])[1] == os.getpid()
    thread.join()


def test_copies_end_with_the_first_job() -> None:
    def sleeps() -> int:
        time.sleep(60)
        return 0

    def fails() -> int:
        raise ValueError("first")

    begun = time.monotonic()
    with forking(), pytest.raises(ValueError, match="first"):
        in_parallel([fails, sleeps])
    with forking():
        begin(sleeps)
        (copy,) = started
    assert time.monotonic() - begun < 30
    assert not copy.is_running()  # type: ignore[attr-defined]
    assert not started


def test_a_copy_ignores_the_terminal_and_computes_in_one_thread() -> None:
    def facts() -> tuple[object, int, float]:
        made = torch.ones(2**20).sum()  # would use the threads of the first process
        return signal.getsignal(signal.SIGINT), torch.get_num_threads(), float(made)

    jobs: list[Callable[[], tuple[object, int, float]]] = [facts, facts]
    with forking():
        assert in_parallel(jobs)[1] == (signal.SIG_IGN, 1, 2.0**20)


def test_idle_work_gives_way() -> None:
    with forking():
        assert begin(partial(os.getpriority, os.PRIO_PROCESS, 0))() == forked_work.IDLE
