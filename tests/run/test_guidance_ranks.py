"""Pipelines with guidance on two groups of ranks, of which each computes one prediction of a step: gloo, on the CPU."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from context_ranks import Trial, run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

CLOSE = 1e-5  # of the largest value: kernels round other numbers of rows and items differently
PAIRS = "transformer: of {} pairs of calls, each group computed one call"
SAME = "transformer: both groups of ranks compute the same: "
UNGUIDED = {"guidance_scale": 1.0}


def drawn(size: int, *trials: Trial) -> list[list[Trial]]:
    """What each rank says of each trial; all draw the same pictures, bit for bit."""
    said = list(zip(*run_ranks(size, trials, module="guided_ranks"), strict=True))
    assert len(said) == len(trials), said
    for trial, ranks in zip(trials, said, strict=True):
        assert all("pictures" in each for each in ranks), (trial, ranks)
        assert all(each["pictures"] == ranks[0]["pictures"] for each in ranks), trial
        assert all(each["pictures"][0] == each["pictures"][1] for each in ranks if len(each["pictures"]) > 1), trial
        assert all(each["apart"] <= CLOSE and each["undone"] for each in ranks), (trial, ranks)
    return [list(ranks) for ranks in said]


def test_two_groups_draw_what_one_process_draws() -> None:
    halves, pairs, early, written, alone = drawn(
        2,
        {"name": "StableDiffusion", "level": 0, "calls": 1},
        {"name": "Wan", "level": 3},
        {"name": "Wan", "level": 0, "calls": 1, "reads": "numpy"},
        {"name": "Wan", "level": 0, "calls": 1, "reads": "write"},
        {"name": "Wan", "level": 0, "calls": 1, "call": UNGUIDED | {"num_inference_steps": 5}},
    )
    for each in halves:
        assert "  2 groups of ranks, one for each guidance prediction" in each["plan"]
        assert not [note for note in each["notes"][0] if "both groups" in note]
    for number, each in enumerate(pairs):
        assert all(PAIRS.format(count) in notes for count, notes in zip((1, 2, 1), each["notes"], strict=True))
        assert each["runs"] == 3 - number  # of 4: the first is computed by both groups, to learn of its output
    for each in (*early, *written, *alone):
        (note,) = (note for note in each["notes"][0] if note.startswith(SAME))
        assert note == f"{SAME}no two of its calls are in a row before the first one's output is read"
