"""Ranks on two nodes, played by two network namespaces of this computer, which a pair of virtual devices joins."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch.distributed as dist
from PIL import Image

from tiny_pipelines import CASES

NETWORK = "10.213.77"  # its first three numbers
DRAW = ["a fox", "--height", "64", "--width", "64", "--seed", "3", "--device", "cpu"]
PORT = "29533"


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


def can_make_networks() -> bool:
    """Whether this user may make network namespaces, and devices that join them."""
    if sys.platform != "linux" or not shutil.which("ip") or not dist.is_available():
        return False
    name = f"tightfit{os.getpid()}"
    made = ip("netns", "add", name)
    joined = made and ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
    ip("netns", "del", name)
    return joined


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_networks(), reason="network namespaces cannot be made here: that needs root"),
]


class TwoNodes:
    """Two namespaces with the addresses NETWORK.1 and .2, and a folder for each."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.folders = model, [folder / "node0", folder / "node1"]
        self._names = [f"tightfit{os.getpid()}n{node}" for node in range(2)]
        for path in self.folders:
            path.mkdir()
        for name in self._names:
            assert ip("netns", "add", name)
            assert ip("-n", name, "link", "set", "lo", "up")
        one, other = self._names
        assert ip("-n", one, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other)
        for node, name in enumerate(self._names):
            assert ip("-n", name, "addr", "add", f"{NETWORK}.{node + 1}/24", "dev", "wire")
            assert ip("-n", name, "link", "set", "wire", "up")

    def close(self) -> None:
        for name in self._names:
            ip("netns", "del", name)

    def cut(self) -> None:
        """Take the wire away, as where a computer loses its power: nothing is said to the other side."""
        assert ip("-n", self._names[1], "link", "set", "wire", "down")

    @contextlib.contextmanager
    def running(self, ranks_per_node: int, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
        """Yield torchrun on each node, of which the first has rank 0."""
        processes = []
        for node, name in enumerate(self._names):
            launch = ["--nnodes", "2", "--nproc-per-node", str(ranks_per_node), "--node-rank", str(node)]
            launch += ["--master-addr", f"{NETWORK}.1", "--master-port", PORT]
            run = ["-m", "torch.distributed.run", *launch, "-m", "tightfit", "run", str(self.model), *DRAW, *words]
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, *run, "--out", "fox.png"], cwd=self.folders[node],
                    env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        try:
            yield processes
        finally:
            for process in processes:
                for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                    child.kill()
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    CASES[0].make().save_pretrained(path)
    return path


@pytest.fixture
def nodes(model: Path, tmp_path: Path) -> Iterator[TwoNodes]:
    made = TwoNodes(tmp_path, model)
    yield made
    made.close()


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path), dtype=np.int16)


def rank_processes(torchruns: list[subprocess.Popen[str]]) -> dict[int, psutil.Process]:
    found = {}
    for torchrun in torchruns:
        for process in psutil.Process(torchrun.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (rank := process.environ().get("RANK")) is not None:
                    found[int(rank)] = process
    return found


@pytest.mark.parametrize(
    ("per_node", "within"), [(1, ["--budget", "2GB"]), (2, ["--level", "2", "--set", "context_attention=ring"])]
)
def test_two_nodes_draw_the_picture_of_one_process_and_the_first_one_writes_it(
    per_node: int, within: list[str], nodes: TwoNodes, tmp_path: Path
) -> None:
    alone = ["-m", "tightfit", "run", str(nodes.model), *DRAW, "--steps", "2", "--level", "0", "--out", "alone.png"]
    subprocess.run([sys.executable, *alone], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    with nodes.running(per_node, "--steps", "2", *within) as processes:
        said = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [[path.name for path in folder.iterdir()] for folder in nodes.folders] == [["fox.png"], []]
    assert [out.count("wrote ") for out, _ in said] == [1, 0]
    assert f"rank 0 of {2 * per_node}: " in said[0][0]
    difference = np.abs(pixels(nodes.folders[0] / "fox.png") - pixels(tmp_path / "alone.png"))
    assert difference.max() <= 1  # 1e-5 may round a pixel differently


LINE = "tightfit: rank {} of 2 ended: it was killed, or its computer does not answer any more"


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("age", [10, 30], ids=["while it begins", "while it draws"])
def test_a_killed_rank_ends_the_other_node_with_one_line(killed: int, age: float, nodes: TwoNodes) -> None:
    with nodes.running(1, "--steps", "900", "--level", "2") as processes:
        wait_for_ranks(processes, age)
        rank_processes(processes)[killed].kill()
        began = time.monotonic()
        _, said = processes[1 - killed].communicate(timeout=100)
        seconds = time.monotonic() - began
    assert seconds < 30
    assert processes[1 - killed].returncode == 1
    assert [line for line in said.splitlines() if line.startswith("tightfit: ")] == [LINE.format(killed)]
    assert not any(path.name for folder in nodes.folders for path in folder.iterdir())


def test_a_node_that_does_not_answer_any_more_ends_the_other_one(nodes: TwoNodes) -> None:
    with nodes.running(1, "--steps", "900", "--level", "2") as processes:
        wait_for_ranks(processes, 10)
        nodes.cut()
        began = time.monotonic()
        said = [process.communicate(timeout=100)[1] for process in processes]
        seconds = time.monotonic() - began
    assert seconds < 60
    for rank, text in enumerate(said):
        assert [line for line in text.splitlines() if line.startswith("tightfit: ")] == [LINE.format(1 - rank)]


def wait_for_ranks(processes: list[subprocess.Popen[str]], seconds: float) -> None:
    """Wait until both ranks are this old."""
    limit = time.monotonic() + 60
    while len(rank_processes(processes)) < 2:
        assert time.monotonic() < limit
        time.sleep(0.1)
    time.sleep(seconds)
