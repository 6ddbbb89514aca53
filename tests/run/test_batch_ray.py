"""Batches on a Ray cluster of two nodes: requests go where their predicted bytes are, and lost workers cost nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from tightfit import cli

WITH_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not WITH_RAY, reason="Ray is not installed: pip install 'tightfit[ray]'")
STORE = 500 * 2**20
OFFERS = (300_000_000, 60_000_000)  # bytes of the two nodes
WORDS = ("--steps", "3", "--device", "loopback", "--budget", "250MB", "--json")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with two nodes of one CPU each."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster()
    for size in OFFERS:
        made.add_node(
            num_cpus=1, object_store_memory=STORE, include_dashboard=False, resources={"tightfit_bytes": size}
        )
    yield str(made.address)
    made.shutdown()


def batch(model: Path, folder: Path, address: str | None, *words: str) -> Result:
    where = ["--ray"] if address is None else ["--ray-address", address]
    asked = ["batch", str(model), str(folder / "prompts.jsonl"), "--out", str(folder / "out"), *WORDS, *where, *words]
    return CliRunner().invoke(cli.app, asked)


def write(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def small(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": "a fox", "seed": seed, "name": f"fox-{seed}", "height": 64, "width": 64} for seed in range(count)
    ]


def last_line(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def pixels(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.glob("*.png"):
        with Image.open(path) as picture:
            found[path.name] = picture.tobytes()
    return found


@pytest.mark.skipif(WITH_RAY, reason="Ray is installed")
def test_without_ray_one_line_says_what_to_install(tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path, *small(1))
    result = batch(tiny_model, tmp_path, None)
    assert result.exit_code == 2
    assert result.stderr.startswith("tightfit: --ray needs Ray (No module named 'ray'): pip install 'tightfit[ray]'")
    assert not list((tmp_path / "out").glob("*.png"))


@pytest.mark.slow
@needs_ray
def test_requests_go_where_their_bytes_are_and_those_too_large_are_recorded(
    cluster: str, tiny_model: Path, tmp_path: Path
) -> None:
    large = {"prompt": "a fox", "seed": 1, "name": "large", "height": 256, "width": 256, "batch": 4}
    write(tmp_path, *small(3), large, {"prompt": "a", "name": "huge", "height": 8192, "width": 8192})
    result = batch(tiny_model, tmp_path, cluster)
    assert result.exit_code == 1, result.output
    printed = last_line(result)
    assert (printed["drawn"], printed["failed"], printed["pictures"]) == (4, 1, 7), printed
    assert [(each["name"], each["type"]) for each in printed["failures"]] == [("huge", "BudgetTooSmall")]
    records = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    predicted = {record["name"]: record["predicted_peak_bytes"] for record in records}
    assert OFFERS[1] < predicted["large"] <= OFFERS[0]
    assert predicted["fox-0"] <= OFFERS[1]
    shutil.move(tmp_path / "out", tmp_path / "ray")
    write(tmp_path, *small(3), large)
    asked = ["batch", str(tiny_model), str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out"), *WORDS]
    assert CliRunner().invoke(cli.app, asked).exit_code == 0
    assert pixels(tmp_path / "ray") == pixels(tmp_path / "out")


@pytest.mark.slow
@needs_ray
def test_requests_of_a_killed_worker_are_done_again(cluster: str, tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path, *small(8))
    killed: list[int] = []

    def kill() -> None:
        """Kill a worker as soon as there is a first result."""
        while not killed and not done.wait(0.02):
            results = tmp_path / "out" / "results.jsonl"
            if results.exists() and results.stat().st_size:
                found = workers()[:1]
                for process in found:
                    process.send_signal(signal.SIGKILL)
                killed.extend(process.pid for process in found)

    done = threading.Event()
    thread = threading.Thread(target=kill)
    thread.start()
    result = batch(tiny_model, tmp_path, cluster, "--steps", "30")
    done.set()
    thread.join()
    assert len(killed) == 1
    assert result.exit_code == 0, result.output
    assert (last_line(result)["drawn"], last_line(result)["failed"]) == (8, 0)
    assert any("was lost" in note for note in last_line(result)["notes"])
    found = pixels(tmp_path / "out")
    assert set(found) == {f"fox-{seed}.png" for seed in range(8)}
    assert len(set(found.values())) == 8
    assert len((tmp_path / "out/results.jsonl").read_text().splitlines()) == 8
    assert last_line(batch(tiny_model, tmp_path, cluster, "--steps", "30"))["done_before"] == 8


def workers() -> list[psutil.Process]:
    """Processes of this batch's actors."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "ray::BatchWorker" in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.slow
@needs_ray
def test_a_cluster_without_bytes_is_refused_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    write(tmp_path, *small(1))
    made = Cluster()
    try:
        made.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
        result = batch(tiny_model, tmp_path, str(made.address))
    finally:
        made.shutdown()
    assert result.exit_code == 2
    assert "no node of the cluster offers tightfit_bytes" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
@needs_ray
def test_ctrl_c_leaves_neither_processes_nor_half_written_files(tiny_model: Path, tmp_path: Path) -> None:
    """With a cluster of this computer, started for the batch."""
    write(tmp_path, *small(50))
    asked = ["batch", str(tiny_model), str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out"), *WORDS, "--ray"]
    command = [sys.executable, "-m", "tightfit", *asked, "--steps", "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        results = tmp_path / "out" / "results.jsonl"
        while not (results.exists() and results.stat().st_size):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "tightfit: interrupted by SIGINT: no half-written file is left"
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*pixels(tmp_path / "out"), "results.jsonl"}
