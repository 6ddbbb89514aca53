"""Pipelines with guidance on two groups of ranks, of which each computes one prediction of a step: gloo, on the CPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist

import tightfit
from context_ranks import Trial, run_ranks
from tightfit import PlanError
from tiny_pipelines import CASES

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

CLOSE = 1e-5  # of the largest value: kernels round other numbers of rows and items differently
PAIRS = "transformer: of {} pairs of calls, each group computed one call"
SAME = "transformer: both groups of ranks compute the same: "
READ = "no two of its calls are in a row before the first one's output is read"


def drawn(size: int, *trials: Trial) -> list[list[Trial]]:
    """What each rank says of each trial."""
    said = [list(ranks) for ranks in zip(*run_ranks(size, trials, module="guided_ranks"), strict=True)]
    assert len(said) == len(trials), said
    for trial, ranks in zip(trials, said, strict=True):
        if "fails" not in trial:
            check_drawn(trial, ranks)
    return said


def check_drawn(trial: Trial, ranks: list[Trial]) -> None:
    """All ranks drew the same pictures, bit for bit, and the same again; they are right."""
    assert all("pictures" in each for each in ranks), (trial, ranks)
    assert all(each["pictures"] == ranks[0]["pictures"] for each in ranks), trial
    assert all(each["pictures"][0] == each["pictures"][1] for each in ranks if len(each["pictures"]) > 1), trial
    assert all(each["apart"] <= CLOSE and each["undone"] for each in ranks), (trial, ranks)


def test_two_groups_draw_what_one_process_draws() -> None:
    failed, halves, pairs, early = drawn(
        2,
        {"name": "Flux", "level": 0, "fails": 0},
        {"name": "StableDiffusion", "level": 0, "calls": 1},
        {"name": "Flux", "level": 3},
        {"name": "Flux", "level": 0, "calls": 1, "reads": "write"},
    )
    assert failed[0]["error"] == "ArithmeticError: of the user's own", failed
    assert failed[1]["error"].startswith("RunError: rank 1: another rank ended or does not answer: "), failed
    assert all(each["apart"] <= CLOSE for each in failed)  # of the next call
    for each in halves:
        assert "  2 groups of ranks, one for each guidance prediction" in each["plan"]
        assert not [note for note in each["notes"][0] if "both groups" in note]
    for number, each in enumerate(pairs):
        assert all(PAIRS.format(count) in notes for count, notes in zip((1, 2, 1), each["notes"], strict=True))
        assert each["runs"] == 3 - number  # of 4: the first is computed by both groups, to learn of its output
    for each in early:
        assert each["notes"][0][0] == f"{SAME}{READ}"


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["sum", "numpy", "view", "write"])
def test_an_output_that_is_read_early_is_right(reads: str) -> None:
    for said in drawn(2, *({"name": name, "level": 3, "calls": 1, "reads": reads} for name in ("Flux", "Wan"))):
        assert all(each["notes"][0][0] == f"{SAME}{READ}" for each in said)


@pytest.mark.slow
def test_a_rank_that_reads_early_alone_gets_an_error() -> None:
    trial = {"name": "Flux", "level": 0, "calls": 1, "reads": "sum", "reader": 1}
    (one,), (other,) = run_ranks(2, [trial], module="guided_ranks")
    for each in (one, other):
        assert re.match(
            r"RunError: transformer: rank \d was called with other values, or read an output earlier, than rank \d",
            each["error"],
        ), each


@pytest.mark.slow
def test_without_guidance_both_groups_compute_the_same() -> None:
    once, odd, late = drawn(
        2,
        {"name": "Wan", "level": 0, "call": {"guidance_scale": 1.0, "num_inference_steps": 5}},
        {"name": "StableDiffusion", "level": 0, "call": {"guidance_scale": 1.0, "num_images_per_prompt": 1}},
        {"name": "StableDiffusion", "level": 0, "call": {"guidance_scale": 1.0, "num_images_per_prompt": 3}},
    )
    for each in (*once, *odd, *late):
        assert re.match(r"\w+: both groups of ranks compute the same: ", each["notes"][0][0])


@pytest.mark.slow
def test_calls_that_carry_something_to_the_next_are_made_in_both_groups() -> None:
    trial: Trial = {"name": "Flux", "level": 0, "calls": 1, "call": {"num_inference_steps": 3}}
    hooks, forwards = drawn(2, trial | {"counts": "hook"}, trial | {"counts": "forward"})
    assert all("a hook of somebody else's is on FluxTransformer2DModel" in each["notes"][0][0] for each in hooks)
    assert all(f"{SAME}3 calls each changed the network's attributes" in each["notes"][0] for each in forwards)


@pytest.mark.slow
def test_ranks_keep_to_their_budgets() -> None:
    halves, pairs = drawn(2, {"name": "StableDiffusion", "budget": "60MB"}, {"name": "Flux", "budget": "140MB"})
    for each in (*halves, *pairs):
        assert each["peak"] <= each["predicted"] <= 140e6
        assert "  2 groups of ranks, one for each guidance prediction" in each["plan"]
    assert [each["runs"] for each in pairs] == [3, 2]


def test_a_plan_chooses_how_many_groups_and_a_call_without_guidance_changes_it() -> None:
    """And of cards of which one has a third of the other's speed, the faster one has more rows."""
    trial: Trial = {"name": "StableDiffusion", "budget": "400MB", "parallel": "auto", "scale": 8}
    rates = {"arithmetic_rates": {"float32": 1e9}, "exchange_rate": 2e9, "exchange_latency": 20e-6}
    slower = rates | {"arithmetic_rates": {"float32": 3e8}}
    said, unlike = drawn(2, trial | {"rates": rates, "unguided": True}, trial | {"rates": [rates, slower], "calls": 1})
    for each in said:
        assert each["layouts"] == [[1, 2], [1, 2], [2, 1]], each
        assert not [note for notes in each["notes"] for note in notes if "both groups" in note or "every rank" in note]
        assert any("2 ranks share the rows, attention" in note for note in each["notes"][2]), each["notes"]
        assert re.search(r"because: ranks in one group: predicted are .*; with two groups ", each["plan"])
    for each in unlike:
        assert each["layouts"] == [[2, 1]], each
        assert re.search(r"  2 ranks share the rows as 1 : 0\.[23]\d+, attention ", each["plan"]), each["plan"]
        assert re.search(r"because: ranks share the rows as 1 : .*the slowest rank then needs", each["plan"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["StableDiffusion", "Wan", "Flux"])
def test_two_groups_of_two_ranks_draw_what_one_process_draws(name: str) -> None:
    (said,) = drawn(4, {"name": name, "level": 0, "attention": "ring"})
    for each in said:
        assert "  2 ranks share the rows, attention ring" in each["plan"]
        assert not [note for notes in each["notes"] for note in notes if "both groups" in note or "every rank" in note]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"cfg": 3}, r'"cfg" is 1, 2 for a group of ranks for each guidance prediction, or "auto", not 3'),
        ({"cfg": "auto", "context": 2}, r"is for 2 ranks and the process group has 1"),
        ({"cfg": "2"}, r"not '2'"),
        ({"context": "1"}, r'"context" is a number of ranks, not'),
        ({"cfg": 2}, r"is for 2 ranks, 2 groups of 1, and the process group has 1"),
        ({"context": 2, "cfg": 2}, r"is for 4 ranks, 2 groups of 2, and the process group has 1"),
        ({"guidance": 2}, r"kind of parallelism"),
    ],
)
def test_what_is_asked_of_guidance_groups_is_checked_first(parallel: Any, message: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlanError, match=message):
            tightfit.fit(CASES[0].make(), level=0, device="loopback", parallel=parallel)
    finally:
        dist.destroy_process_group()


def test_a_plan_for_two_groups_is_for_as_many_ranks() -> None:
    with pytest.raises(PlanError, match=r"the plan is for 4 ranks in 2 groups, and 1 would run it: .*cfg_groups out"):
        tightfit.fit(CASES[0].make(), plan={"context": 2, "cfg_groups": 2}, device="loopback")
