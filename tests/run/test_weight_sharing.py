"""Ranks of one computer have one copy of offloaded weights in host memory: gloo, on the loopback device."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from context_ranks import Trial
from context_ranks import run_ranks as run_module
from tightfit.apply.context_parallel.weight_sharing import teams_of
from tightfit.devices.memory_file import MemoryFile
from tightfit.schema.stores import STORES

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files in memory"),
    pytest.mark.skipif("Pss_Shmem" not in Path("/proc/self/smaps_rollup").read_text(), reason="needs a newer kernel"),
]

CLOSE = 1e-5  # of the largest value: kernels round other numbers of rows differently
MORE = 60e6  # bytes that the first calls of a process take for libraries
SD: Trial = {"name": "StableDiffusion", "level": 3}


def run_ranks(size: int, trials: list[Trial]) -> list[list[Trial]]:
    """With a cache of their own: their first trial exports graphs, for which torch imports libraries of 20 MB."""
    with tempfile.TemporaryDirectory() as cache:
        return run_module(size, trials, module="sharing_ranks", settings={"XDG_CACHE_HOME": cache})


def check(said: list[list[Trial]]) -> list[list[Trial]]:
    """The picture is that of one process, and after undo all is as it was."""
    for its in said:
        for each in its:
            assert each["apart"] <= CLOSE, each
            assert each["same"], each
            assert each["ordinary"], each
            assert each["undone"], each
            assert each["files"] == 0, each
    return said


def growth(each: Trial, at: int) -> int:
    """Bytes that a rank has more than without the pipeline: 1 with it, 2 fitted, 3 after calls, 4 after undo."""
    return int(each["memory"][at] - each["memory"][0])


def one_copy(trials: list[Trial], more: float) -> None:
    """All ranks together have one copy of the weights; before and after, each has its own."""
    size = trials[0]["weights"]
    for at in (2, 3):
        together = sum(growth(each, at) for each in trials)
        assert 0.9 * size <= together <= size + len(trials) * more, (at, together, size)
    for each in trials:
        assert abs(growth(each, 1) - size) <= 5e6
        assert size - 5e6 <= growth(each, 4) <= size + more


def test_two_ranks_have_one_copy() -> None:
    first = {**SD, "pinned": True, "checks": True, "scale": 4}
    said = check(run_ranks(2, [first, SD, {**SD, "then": "copied"}]))
    for rank, (locks, plain, copied) in enumerate(said):
        assert locks["shared"] == plain["shared"] == ["text_encoder", "unet", "vae"]
        assert (locks["left"], locks["died"]) == (0, [])
        assert 0.9 * locks["weights"] < locks["locked"] <= locks["weights"]
        head = f"rank {rank} of 2: "
        assert any(note.endswith(" of weights in host memory are one copy for 2 ranks") for note in plain["notes"])
        assert not any("page-locked" in note for note in plain["notes"])
        assert [note for note in locks["notes"] if note.startswith(head) and "page-locked by this rank" in note]
        assert copied["copied"]
        assert copied["redrawn"] <= CLOSE
    one_copy([plain for _, plain, _ in said], 10e6)


@pytest.mark.slow
def test_three_ranks_have_one_copy_and_share_what_a_plan_stores_in_eight_bits() -> None:
    eight = {"level": 3, "components": {"unet": {"placement": "stream", "storage": "float8_e4m3fn"}}}
    said = run_ranks(3, [{**SD, "scale": 4}, SD, {"name": "StableDiffusion", "plan": eight}])
    check([its[:2] for its in said])
    one_copy([its[1] for its in said], 10e6)
    for *_, stored in said:
        assert stored["same"]
        assert stored["shared"] == ["text_encoder", "unet", "vae"]
        assert stored["undone"]
        # the weights as they were are kept for undo, by each rank
        assert growth(stored, 2) <= stored["weights"] * (1 + 0.35 / 3) + 10e6


@pytest.mark.slow
def test_what_one_rank_writes_the_others_do_not_see() -> None:
    small = {**SD, "checks": True}
    (first, other) = run_ranks(2, [{**small, "then": "written"}])
    assert [round(factor, 3) for factor in first[0]["factors"]] == [2, 2]
    assert [round(factor, 3) for factor in other[0]["factors"]] == [1, 1]
    assert not first[0]["undone"]  # it keeps what was written
    assert other[0]["undone"]


@pytest.mark.slow
def test_an_adapter_that_is_loaded_and_fused_after_fit() -> None:
    for (trial,) in run_ranks(2, [{**SD, "then": "fused"}]):
        assert max(trial["fused"]) <= CLOSE < 0.01 < trial["difference"]


@pytest.mark.slow
def test_ranks_with_other_weights_keep_their_own() -> None:
    (first,), (other,) = run_ranks(2, [{**SD, "differs": 1, "checks": True}])
    assert first["shared"] == ["text_encoder", "unet", "vae"]
    assert other["shared"] == ["text_encoder", "vae"]
    for each in (first, other):
        assert each["undone"]
        assert any(note.startswith("ranks have different weights of unet: ") for note in each["notes"]), each["notes"]


@pytest.mark.parametrize("level", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_other_values_are_noticed_in_what_is_not_shared(level: int) -> None:
    """A bias of three values, which is in no shared memory, on one of two ranks."""
    small = {"name": "StableDiffusion", "scale": 1, "level": level}
    same, other = zip(*run_ranks(2, [small, {**small, "differs_little": 1}]), strict=True)
    assert not any("different weights" in note for each in same for note in each["notes"])
    for each in other:
        assert any(note.startswith("ranks have different weights of vae: ") for note in each["notes"]), each["notes"]


def test_where_memory_cannot_be_shared_each_rank_has_its_copy() -> None:
    small = {**SD, "scale": 4}
    said = check(run_ranks(2, [{**small, "broken": [1, "no files"]}, {**small, "broken": [0, "little memory"]}]))
    reasons = (
        "rank 1's memory cannot be opened: there is none",
        "no file in memory can be made: Function not implemented",
    )
    for reason, (refused, short) in zip(reasons, said, strict=True):
        assert refused["shared"] == short["shared"] == []
        assert any(note.endswith(f" are a copy of its own: {reason}") for note in refused["notes"]), refused["notes"]
        assert any("rank 0: sharing takes 15.6 MiB more for a moment, of " in note for note in short["notes"]), short


@pytest.mark.slow
def test_weights_stay_shared_when_another_plan_follows() -> None:
    trial = {"name": "StableDiffusion", "budget": "200MB", "later": True}
    said = check(run_ranks(2, [SD, trial]))
    for _, its in said:
        assert "unet" in its["shared"]
    together = sum(growth(its, 3) for _, its in said)
    assert together <= said[0][1]["weights"] * 1.1 + 2 * MORE


def test_a_rank_that_is_killed_leaves_nothing() -> None:
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    before = {path for folder in folders if folder.exists() for path in folder.glob("tightfit*")}
    first, gone, last = run_ranks(3, [{**SD, "scale": 4, "killed": 1}])
    assert "sum" not in gone[0]
    assert first == last  # both still have all values
    assert first[0]["files"] > 0
    assert {path for folder in folders if folder.exists() for path in folder.glob("tightfit*")} == before


def test_a_file_in_memory_is_gone_with_its_last_mapping() -> None:
    size = 3 * mmap.PAGESIZE
    file = MemoryFile.create(size)
    other = MemoryFile.open(file.address)
    file.shared(mmap.PAGESIZE, 8).fill_(7)
    assert other.shared(mmap.PAGESIZE, 8).tolist() == [7] * 8
    other.private(mmap.PAGESIZE, 8).fill_(1)
    assert file.shared(mmap.PAGESIZE, 8).tolist() == [7] * 8
    assert other.private(mmap.PAGESIZE, 8).tolist() == [1] * 8
    view, address = other.shared(0, size), file.address
    del file, other
    gc.collect()
    assert view[mmap.PAGESIZE] == 7
    with pytest.raises((OSError, ValueError)):
        MemoryFile.open(address)
    del view
    gc.collect()
    assert "memfd:tightfit-weights" not in Path("/proc/self/maps").read_text()


def test_teams_reach_each_other() -> None:
    yes, no = True, False
    assert teams_of([[yes, yes], [yes, yes]]) == ((0, 1),)
    assert teams_of([[yes, yes], [no, yes]]) == ((0,), (1,))
    # two containers of two ranks each
    assert teams_of([[yes, no, yes, no], [no, yes, no, yes]] * 2) == ((0, 2), (1, 3))
    # a rank that reaches both others, which do not reach each other
    assert teams_of([[yes, yes, yes], [yes, yes, no], [yes, no, yes]]) == ((0,), (1,), (2,))


def test_each_rank_counts_its_share() -> None:
    assert [STORES["cpu"].ram_bytes(1001, ranks) for ranks in (1, 2, 4)] == [1001, 501, 251]
    assert STORES["disk"].ram_bytes(1001, 2) == 0
