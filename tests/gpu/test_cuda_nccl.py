"""Two ranks on two cards, with NCCL: its collectives, pipelines whose rows are shared, and ranks that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from context_ranks import HELD, Trial, run_ranks
from cuda_stub import driver
from tightfit.devices.cuda_support import cuda_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_count() < 2, reason="needs two CUDA cards"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL"),
]

CLOSE = 1e-5  # of the largest value
BOTH = "cpu:gloo,cuda:nccl"
KINDS = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]


def ranks(*trials: Trial, module: str = "context_ranks", **settings: str) -> list[list[Trial]]:
    return run_ranks(2, trials, timeout=240, module=module, backend=BOTH, settings=settings)


def test_collectives_compute_what_the_cpu_does() -> None:
    for said in ranks(*({"dtype": kind} for kind in KINDS), module="nccl_ranks"):
        assert [one.get("wrong", one) for one in said] == [[]] * len(KINDS)
        assert said[-1]["counts"]["races"] == said[-1]["counts"]["hazards"] == 0


@pytest.mark.skipif(not driver.loaded(), reason="a real card may be fast enough")
def test_a_wait_that_is_left_out_shows() -> None:
    for rank, (found,) in enumerate(ranks({"without_wait": True}, module="nccl_ranks")):
        assert found["found"] == [[2.0], [4.0]][rank], found  # the second sum, or the third, is not there
        assert found["after"] == [8.0]
        assert found["counts"]["races"] > 0


@pytest.mark.parametrize(
    ("name", "attention", "plan"),
    [
        ("StableDiffusion", "gathered", {"level": 0}),
        ("StableDiffusion", "gathered", {"level": 0, "vae": {"strips": 2**14}}),
        ("Flux", "ring", {"level": 3}),
        ("Flux", "heads", {"level": 0}),
    ],
)
def test_two_ranks_draw_what_they_draw_with_gloo(
    name: str, attention: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    trial = {"name": name, "plan": plan, "attention": attention, "kept": str(tmp_path / "nccl")}
    for (found,) in ranks(trial | {"device": "cuda"}):
        assert found["apart"] <= CLOSE, found
        assert found["same"], found
        assert not [note for note in found["notes"] if "every rank" in note]
        if driver.loaded():
            assert found["counts"]["races"] == found["counts"]["hazards"] == 0
            assert found["counts"]["nccl_calls"] > 50
    run_ranks(2, [trial | {"kept": str(tmp_path / "gloo")}], timeout=240)
    pictures = {kind: [torch.load(tmp_path / f"{kind}-{rank}.pt") for rank in range(2)] for kind in ("nccl", "gloo")}
    for kind in pictures.values():
        assert torch.equal(kind[0], kind[1])
    largest = pictures["gloo"][0].abs().max()
    assert (pictures["nccl"][0] - pictures["gloo"][0]).abs().max() <= CLOSE * largest


@pytest.mark.parametrize("name", ["StableDiffusion", "Wan"])  # halves of a batch, and calls in turns
def test_two_groups_compute_the_guidance_predictions(name: str) -> None:
    (one,), (other,) = ranks({"name": name, "level": 0, "device": "cuda"}, module="guided_ranks")
    assert one["pictures"] == other["pictures"]
    for found in (one, other):
        assert found["apart"] <= CLOSE, found
        assert found["undone"]
        if driver.loaded():
            assert found["counts"]["races"] == found["counts"]["hazards"] == 0
            assert found["counts"]["nccl_calls"] > 5


@pytest.mark.parametrize("noticed", ["0", "1"])
def test_a_rank_that_is_killed_ends_the_others_call(noticed: str) -> None:
    """Whether NCCL says so (between computers), or its kernels wait for ever (between cards of one)."""
    trial = {"name": "StableDiffusion", "level": 0, "device": "cuda", "attention": "ring", "killed": 1}
    (first,), _ = ranks(trial, STUB_NCCL_NOTICED=noticed)
    assert first["error"].startswith("RunError: rank 0: another rank ended or does not answer: "), first
    assert first["seconds"] < 30


def test_a_rank_whose_call_fails_ends_the_others_call_and_the_next_is_right() -> None:
    trial = {"name": "StableDiffusion", "level": 0, "device": "cuda", "fails": 1}
    (other,), (own,) = ranks(trial, STUB_NCCL_NOTICED="0")
    assert own["error"] == "ArithmeticError: of the user's own"
    assert other["error"].startswith("RunError: rank 0: another rank ended or does not answer: "), other
    assert other["ended"] - own["ended"] < HELD / 2
    assert max(own["apart"], other["apart"]) <= CLOSE
