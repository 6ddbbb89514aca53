"""Pipelines whose networks' rows are shared by the ranks of a process group: gloo, on the CPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import tightfit
from context_ranks import HELD, Trial, run_ranks
from tightfit import PlanError
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.weight_sharing import WeightSharing
from tightfit.devices.ram import computer_mark
from tiny_pipelines import CASES

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

CLOSE = 1e-5  # of the largest value: kernels round other numbers of rows differently
SMALL_STRIPS = {"strips": 2**14}
TALL: Trial = {"name": "StableDiffusion", "budget": "80MB", "attention": "gathered", "tall": 1024}
TOO_SMALL: Trial = {"name": "StableDiffusion", "budget": "30MB", "attention": "ring"}
CHANGED: Trial = {"name": "StableDiffusion", "level": 0, "attention": "gathered", "changed": True}
OTHER: Trial = {"name": "StableDiffusion", "level": 0, "attention": "gathered", "other_network": 1}
FAILS: Trial = {"name": "StableDiffusion", "level": 0, "fails": 1}


def test_two_ranks_draw_what_one_process_draws() -> None:
    unseeded = {"name": "StableDiffusion", "level": 0, "unseeded": True}
    trials = [
        {"name": "StableDiffusion", "plan": {"level": 0, "rank_shares": [20, 1]}, "attention": "gathered"},
        {"name": "StableDiffusion", "plan": {"level": 3, "vae": {"shared": False}}, "attention": "heads"},
        {"name": "Flux", "plan": {"level": 3, "rank_shares": [3, 1]}, "attention": "ring", "unknown": True},
        {"name": "StableDiffusion", "plan": {"level": 0, "rank_shares": [2, 1], "vae": SMALL_STRIPS}, "decodes": 2},
        {"name": "StableDiffusion3", "level": 0, "attention": "ring", "other_height": 96},  # its end is whole on each
        {"name": "StableDiffusion", "budget": "56MB", "attention": "ring"},
    ]
    said = run_ranks(2, [FAILS, OTHER, TOO_SMALL, TALL, CHANGED, unseeded, *trials])
    check_failed(said)
    (_, apart, refused, tall, changed, drawn, *first), (_, its, same, _, _, too, *second) = said
    for failed in (apart, its):
        assert re.match(r"RunError: unet: rank \d has other arguments, or another network, than rank", failed["error"])
    assert changed["apart"] <= CLOSE < 0.01 < changed["change"]
    assert refused == same
    assert re.match(
        r"BudgetTooSmall: rank 0: StableDiffusionPipeline cannot do 64×64 within 28\.6 MiB", refused["error"]
    )
    assert (tall["vae"]["shared"], tall["vae"]["strips"] < 8e6) == (True, True), tall
    assert "each rank computes its rows of autoencoders in strips within" in tall["plan"]
    assert tall["apart"] <= CLOSE
    assert tall["peak"] <= tall["predicted"] <= 80e6
    assert len(first) == len(second) == len(trials), (first, second)
    assert drawn["sum"] == too["sum"]
    for trial, one, other in zip(trials, first, second, strict=True):
        if "budget" in trial:
            assert one["peak"] <= one["predicted"] <= 56e6
            assert " are sent: a call exchanges them with other ranks in " in one["plan"]
        assert one["apart"] <= CLOSE, (trial, one)
        assert one["apart"] == other["apart"]
        assert max(one["decoded"], one["other"]) <= CLOSE, (trial, one)
        assert one["same"], trial
        assert one["undone"], trial
        assert not [note for note in one["notes"] if "every rank" in note]
        speeds = trial.get("plan", {}).get("rank_shares", [])
        shares = f" as {' : '.join(map(str, speeds))}" if speeds else ""
        assert f"  2 ranks share the rows{shares}, attention " in one["plan"]


def test_a_rank_that_is_killed_ends_the_others_call() -> None:
    trial = {"name": "StableDiffusion", "level": 0, "killed": 1}
    (first,), _ = run_ranks(2, [trial], timeout=120)
    assert first["error"].startswith("RunError: rank 0: another rank ended or does not answer: "), first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Flux", "StableDiffusion"])
def test_ranks_agree_on_attention(name: str) -> None:
    said = [one for (one,) in run_ranks(2, [{"name": name, "budget": "200MB"}])]
    assert all(one["apart"] <= CLOSE and one["same"] and one["undone"] for one in said)
    (chosen,) = {next(line for line in one["plan"].splitlines() if "ranks share the rows" in line) for one in said}
    (reason,) = {next(line for line in one["plan"].splitlines() if "attention of ranks by " in line) for one in said}
    assert {"ring": "a ring", "gathered": "gathered keys", "heads": "heads"}[chosen.split()[-1]] in reason


@pytest.mark.slow
def test_a_rank_whose_call_fails_ends_the_others_calls_and_the_next_call_is_right() -> None:
    check_failed(run_ranks(3, [FAILS], timeout=240))


def check_failed(said: list[list[Trial]]) -> None:
    """Rank 1's call failed: so did the others', without waiting until its error was handled."""
    theirs = said[1][0]
    assert theirs["error"] == "ArithmeticError: of the user's own"
    for rank, (its, *_) in enumerate(said):
        if rank != 1:
            assert its["error"].startswith(f"RunError: rank {rank}: another rank ended or does not answer: "), its
            assert its["ended"] - theirs["ended"] < HELD / 2
        assert its["apart"] <= CLOSE


def test_what_is_asked_of_parallelism_is_checked_first() -> None:
    pipe = CASES[0].make()
    with pytest.raises(PlanError, match=r"needs a process group: start with torchrun"):
        tightfit.fit(pipe, level=0, device="loopback", parallel={"context": 2})
    with pytest.raises(PlanError, match=r"the plan is for 2 ranks, and 1 would run it"):
        tightfit.fit(pipe, plan={"context": 2}, device="loopback")
    with pytest.raises(
        PlanError, match=r"parallel='auto' goes with a budget for each rank's one device.* not with devi"
    ):
        tightfit.fit(pipe, max_memory={"cpu": "1GB"}, parallel="auto")
    with pytest.raises(PlanError, match=r"not with budget=954 MiB on cuda:0 and 954 MiB on cuda:1"):
        tightfit.fit(pipe, budget={"cuda:0": "1GB", "cuda:1": "1GB"}, parallel="auto")


def test_a_group_for_cards_only_is_refused() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlanError, match=r'init_process_group\("cpu:gloo,cuda:nccl"\), not \'cuda:gloo\''):
            tightfit.fit(CASES[0].make(), level=0, device="loopback", parallel="auto")
    finally:
        dist.destroy_process_group()


class _MarkedGroup(RankGroup):
    """Rank 1 of three, of which the others say these marks of their computers, and have no memory to share."""

    def __init__(self, *marks: str) -> None:
        self.rank, self._marks = 1, marks

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        yield

    def all_gather_text(self, text: str) -> list[str]:
        marks = [f"{mark}\n\n" if text else "" for mark in self._marks]  # of weights, of which there are none, nothing
        return [marks[0], text, marks[1]]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * 3


def test_computers_of_the_same_name_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    own = computer_mark()
    counted = {}
    for marks in ((own, own), (own, "other"), ("other", "localhost")):
        group = _MarkedGroup(*marks)
        WeightSharing.among(group)
        counted[marks] = group.ranks_here
    assert list(counted.values()) == [3, 2, 1]
