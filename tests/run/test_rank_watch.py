"""Ranks that compute, and exchange nothing, learn that another one has ended; one of each computer says so."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from tightfit.errors import RunError
from tightfit.run import launched_ranks, rank_watch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

RANK = """
import os, select, sys, time, typer
from tightfit.errors import InputError, RunError
from tightfit.run import launched_ranks, rank_watch
from tightfit.signals import end_on_signals
from tightfit.terminal import errors_as_lines
rank_watch.OWN_END = float(os.environ.get("OWN_END", 1.0))
launched_ranks.BEGIN, launched_ranks.NEWS = 3.0, 0.5
rank_watch.BEGIN = 3.0
if "PATIENT" in os.environ:
    launched_ranks.BEGIN = rank_watch.BEGIN = 60.0
if "CLOSED" in os.environ:
    rank_watch.RankWatch._listen = lambda self, port, token: setattr(self, "_place", (1, token))  # nothing listens
def load(own, watch):
    print("loads torch", flush=True, file=sys.stderr)
    time.sleep(120)
if os.environ.get("SLOW") in (os.environ["RANK"], "all"):
    launched_ranks._join = load
def lines():
    stdin = open(0, "rb", buffering=0)
    while True:  # a signal that comes just before a read is handled after it
        if select.select([stdin], [], [], 0.2)[0]:
            if not (line := stdin.readline()):
                return
            yield line.decode()
end_on_signals()
try:
    with errors_as_lines(False), launched_ranks.launched_rank() as rank:
        print("begun", flush=True, file=sys.stderr)
        for line in lines():
            what, which = line.split()
            if which in (str(rank.rank), "all"):
                if what == "leave":
                    break
                if what == "exchange":
                    raise RunError(f"rank {rank.rank}: another rank does not answer: x", ended_by="another rank")
                raise {"input": InputError, "run": RunError}[what]("of its own")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
NODES = [(0, 0), (0, 1), (1, 0)]  # of three ranks: which computer, and which number there
ENDED = "tightfit: rank {} of 3 ended: it was killed, or its computer does not answer any more\n"
FAILED = "tightfit: rank {} of 3 ended with an error, which it says itself: all ranks end\n"

Processes = list[subprocess.Popen[str]]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def started(*ranks: int, port: int | None = None) -> Iterator[Processes]:
    """Some of three ranks; they are killed in the end."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": "3",
    }
    common |= {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], text=True,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(NODES[rank][1])},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def begun() -> Iterator[Processes]:
    """Three ranks on two computers, which are in their process group and wait."""
    with started(0, 1, 2) as processes:
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline() == "begun\n"
        yield processes


@pytest.fixture
def ranks() -> Iterator[Processes]:
    with begun() as processes:
        yield processes


def tell(processes: Processes, words: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{words}\n")
        process.stdin.flush()


def ends(processes: Processes, seconds: float = 15) -> list[tuple[int, str]]:
    """Exit code and stderr of each."""
    return [(process.wait(seconds), process.stderr.read()) for process in processes if process.stderr is not None]


@pytest.mark.parametrize("killed", range(3))
def test_a_killed_rank_ends_the_others_with_a_line_on_each_computer(killed: int, ranks: Processes) -> None:
    began = time.monotonic()
    ranks[killed].kill()
    said = ends(ranks)
    assert time.monotonic() - began < 10
    speakers = {0: (1, 2), 1: (0, 2), 2: (0,)}[killed]
    for rank, found in enumerate(said):
        if rank != killed:
            assert found == (1, ENDED.format(killed) if rank in speakers else "")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("failing", range(3))
def test_a_rank_with_an_error_of_its_own_says_it_and_the_others_end(failing: int, ranks: Processes) -> None:
    tell(ranks, f"run {failing}")
    own = "tightfit: of its own\n" if failing == 0 else f"tightfit: rank {failing}: of its own\n"
    speakers = {0: (1, 2), 1: (0, 2), 2: (0,)}[failing]
    for rank, found in enumerate(ends(ranks)):
        others = FAILED.format(failing) if rank in speakers else ""
        assert found == (1, own if rank == failing else others)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("failing", range(3))
def test_a_rank_whose_exchange_failed_first_says_it_and_the_others_end(failing: int, ranks: Processes) -> None:
    tell(ranks, f"exchange {failing}")
    own = f"rank {failing}: another rank does not answer: x\n"
    speakers = {0: (1, 2), 1: (0, 2), 2: (0,)}[failing]
    for rank, found in enumerate(ends(ranks)):
        others = FAILED.format(failing) if rank in speakers else ""
        assert found == (1, f"tightfit: {own}" if rank == failing else others)


def test_an_error_that_all_have_is_said_once(ranks: Processes) -> None:
    tell(ranks, "input all")
    assert ends(ranks) == [(2, "tightfit: of its own\n"), (2, ""), (2, "")]


def test_ranks_wait_for_the_first_one_which_writes(ranks: Processes) -> None:
    tell(ranks[1:], "leave all")
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(6)
    assert ranks[2].poll() is None
    tell(ranks[:1], "leave all")
    assert ends(ranks) == [(0, "")] * 3


def test_ranks_that_are_done_fail_where_the_first_one_does(ranks: Processes) -> None:
    tell(ranks[1:], "leave all")
    time.sleep(0.5)
    tell(ranks[:1], "run 0")
    assert ends(ranks) == [(1, "tightfit: of its own\n"), (1, FAILED.format(0)), (1, FAILED.format(0))]


def test_ranks_that_are_done_fail_where_the_first_one_is_killed(ranks: Processes) -> None:
    tell(ranks[1:], "leave all")
    time.sleep(0.5)
    ranks[0].kill()
    assert ends(ranks)[1:] == [(1, ENDED.format(0)), (1, ENDED.format(0))]


def test_ranks_that_cannot_reach_the_first_one_are_not_watched_and_do_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOSED", "1")
    with started(0, 1, 2) as processes:
        tell(processes, "leave all")
        assert ends(processes, 60) == [(0, "begun\n")] * 3


def test_a_signal_to_all_is_said_by_each_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is busy may end later than this file lets others wait: they wait as long as they usually do."""
    monkeypatch.setenv("OWN_END", str(rank_watch.OWN_END))
    with begun() as ranks:
        for process in ranks:
            process.terminate()
        assert ends(ranks) == [(143, "tightfit: interrupted by SIGTERM: no half-written file is left\n")] * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_does_not_begin_is_not_waited_for(missing: int) -> None:
    begun = [rank for rank in range(3) if rank != missing]
    with started(*begun) as processes:
        codes, said = zip(*ends(processes, 40), strict=True)
    lines = ["".join(line for line in text.splitlines(True) if line.startswith("tightfit: ")) for text in said]
    line = f"tightfit: rank {missing} of 3 did not begin within 3 s: killed, or still loading torch"
    own = f"{line}; start all ranks again\n"
    assert codes == (1, 1)
    assert set(lines) <= {own, "", *(FAILED.format(rank) for rank in begun)}  # one may be the first
    assert own in lines


@pytest.mark.parametrize("slow", ["all", "killed"])
@pytest.mark.parametrize("killed", range(3))
def test_a_rank_killed_while_it_loads_torch_ends_the_others(
    killed: int, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they wait for it to begin or load as well."""
    monkeypatch.setenv("PATIENT", "1")
    monkeypatch.setenv("SLOW", str(killed) if slow == "killed" else slow)
    with started(0, 1, 2) as processes:
        assert processes[killed].stderr is not None
        assert processes[killed].stderr.readline() == "loads torch\n"
        time.sleep(8 if slow == "all" else 12)  # the others are connected, and wait
        processes[killed].kill()
        began = time.monotonic()
        others = [process for rank, process in enumerate(processes) if rank != killed]
        found = list(ends(others))
        assert time.monotonic() - began < 5
    assert [code for code, _ in found] == [1, 1]
    lines = [line for _, text in found for line in text.splitlines(True) if line.startswith("tightfit: ")]
    assert lines == [ENDED.format(killed)] * (1 if killed == 2 else 2)


def test_the_port_of_another_program_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin at the port that the first one tells then."""
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    early, _ = launched_ranks._early_place(3)
    with socket.create_server(("", early)), started(0, 1, 2, port=port) as processes:
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline() == "begun\n"


def test_a_signal_ends_ranks_that_wait_for_another_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATIENT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does: the store outlives the ranks
    store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    with started(0, 1, port=store.port) as processes:
        store.wait(["tightfit/0/tightfit/begun/0", "tightfit/0/tightfit/begun/1"], timedelta(seconds=30))
        for process in processes:
            process.terminate()
        for code, said in ends(processes):
            assert (code, said) == (143, "tightfit: interrupted by SIGTERM: no half-written file is left\n")


def test_the_first_rank_is_not_waited_for_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in (said | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launched_ranks, "BEGIN", 2.0)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"rank 0 of 2 did not begin within"), launched_ranks.launched_rank():
        pass
    assert time.monotonic() - began < 3.5  # torch's own way takes up to 6
