"""`torchrun -m tightfit run`: ranks that draw one picture together, which the first one writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image

from tightfit.errors import InputError
from tightfit.run.launched_ranks import ALONE, LaunchedRank, rank_here
from tiny_pipelines import CASES

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

DRAW = ["a fox", "--height", "64", "--width", "64", "--steps", "2", "--seed", "3", "--device", "cpu"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tightfit"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    CASES[0].make().save_pretrained(path)
    return path


def launched(command: list[str], *args: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *command, "run", *map(str, args)], env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path), dtype=np.int16)


@pytest.mark.parametrize(
    "within",
    [
        ["--level", "2", "--set", "context_attention=ring"],
        pytest.param(["--level", "0", "--set", "cfg_groups=2"], marks=pytest.mark.slow),
        pytest.param(["--budget", "2GB"], marks=pytest.mark.slow),
    ],
    ids=["level", "groups", "budget"],
)
def test_two_ranks_write_one_picture(folder: Path, within: list[str], tmp_path: Path) -> None:
    alone, together = tmp_path / "alone.png", tmp_path / "out" / "together.png"
    together.parent.mkdir()
    assert launched(["-m", "tightfit"], folder, *DRAW, "--level", "0", "--out", alone).returncode == 0
    said = launched(TORCHRUN, folder, *DRAW, *within, "--out", together)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("wrote ") == 1
    assert "rank 0 of 2: " in said.stdout
    assert "different weights" not in said.stdout + said.stderr
    assert [path.name for path in together.parent.iterdir()] == ["together.png"]
    assert np.abs(pixels(together) - pixels(alone)).max() <= 1  # 1e-5 may round a pixel differently


def test_bad_input_is_said_once(folder: Path) -> None:
    said = launched(TORCHRUN, folder, *DRAW, "--level", "0", "--out", folder / "missing" / "x.png")
    assert said.returncode != 0
    assert said.stderr.count("tightfit: ") == 1, said.stderr
    assert "wrote" not in said.stdout


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 0),  # a cluster's, not torchrun's
        ({"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, 0),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, 0),
    ],
)
def test_only_torchruns_variables_count(said: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert rank_here().rank == rank


def test_each_rank_has_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.devices.cuda_support.usable_cards", lambda: [0, 2])
    ranks = [LaunchedRank(rank, 3, rank) for rank in range(3)]
    assert [rank.device(None) for rank in ranks[:2]] == ["cuda:0", "cuda:2"]
    assert [rank.device(named) for rank in ranks[:2] for named in ("cuda", "cpu")] == ["cuda:0", "cpu", "cuda:2", "cpu"]
    with pytest.raises(InputError, match=r"3 ranks or more run on this computer, which has 2 CUDA cards"):
        ranks[2].device(None)
    assert ALONE.device("cuda") == "cuda"
    assert [ranks[1].parallel(), ranks[1].parallel("ring", 1), ALONE.parallel("ring")] == [
        {"cfg": "auto", "attention": "auto"}, {"cfg": 1, "attention": "ring"}, None,
    ]  # fmt: skip
    assert [rank.writes for rank in ranks] == [True, False, False]
