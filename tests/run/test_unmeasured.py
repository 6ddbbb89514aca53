"""Calls that cannot be measured: level 3 within the budget, the same pictures, and a reason in the report.

The next call is planned by what the first did, as `test_any_call.py` shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from inspection import assert_same, imprint
from simulator.conftest import MakeCards
from tightfit import BudgetTooSmall, RequestError, RunError
from tiny_pipelines import CASES, run

MIB = 2**20
CASE = next(case for case in CASES if case.name == "StableDiffusionXL")


@pytest.fixture
def hooked() -> Any:
    """A pipeline with a hook that knows its own module only, and no copy of it."""
    pipe: Any = CASE.make()
    passes = {id(pipe.unet): 0}

    def count(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        passes[id(module)] += 1

    pipe.unet.register_forward_hook(count)
    return pipe


def test_it_runs_at_level_3_within_the_budget(hooked: Any, make_cards: MakeCards) -> None:
    (card,) = make_cards(capacity=40 * MIB)
    wanted = run(hooked, CASE)
    before = imprint(hooked)
    fitted = tightfit.fit(hooked, budget=40 * MIB, device="simulated:0", request={})
    assert (fitted.plan.level, fitted.plan.lossless, fitted.plan.forecast) == (3, True, ())
    assert torch.allclose(run(hooked, CASE).cpu(), wanted, atol=1e-5)
    assert card.held.peak <= 40 * MIB
    assert "could not be measured (KeyError: " in str(fitted.report())
    fitted.undo()
    assert_same(before, imprint(hooked))


def test_what_the_request_itself_forbids_is_an_error(hooked: Any, make_cards: MakeCards) -> None:
    make_cards(capacity=40 * MIB)
    with pytest.raises(RequestError, match="takes no frames"):
        tightfit.fit(hooked, budget=40 * MIB, device="simulated:0", request={"frames": 5})


def test_too_little_memory_is_said_with_the_reason(hooked: Any, make_cards: MakeCards) -> None:
    make_cards(capacity=40 * MIB)
    tightfit.fit(hooked, budget=2 * MIB, device="simulated:0", request={})
    with pytest.raises(BudgetTooSmall, match=r"not enough for level 3.*KeyError"):
        run(hooked, CASE)


def test_a_default_that_the_model_cannot_do_does_not_stand_in_the_way(make_cards: MakeCards) -> None:
    """A tiny Wan ends before its pipeline's usual 480×832; the call itself asks for less, and is planned."""
    make_cards(capacity=512 * MIB)
    case = next(case for case in CASES if case.name == "Wan")
    pipe = case.make()
    wanted = run(pipe, case)
    fitted = tightfit.fit(pipe, budget=512 * MIB, device="simulated:0", request={})
    assert fitted.plan.level == 3
    assert torch.allclose(run(pipe, case).cpu(), wanted, atol=1e-5)
    assert fitted.plan.forecast


def test_a_folder_whose_call_cannot_be_measured_is_loaded_all_the_same(
    tiny_model: Path, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops a rehearsal, an error of this package's own too, is no reason to refuse."""

    def needs_numbers(*_: Any) -> None:
        raise RunError("a copy to the host needs the numbers of a tensor")

    make_cards(capacity=512 * MIB)
    monkeypatch.setattr("tightfit.run.footprints.Measurer.measure", needs_numbers)
    pipe, fitted = tightfit.load(tiny_model, budget=512 * MIB, device="simulated:0")
    assert (fitted.plan.level, fitted.plan.forecast) == (3, ())
    assert "needs the numbers" in fitted.plan.reasons[0].because
    pipe("a fox", num_inference_steps=1, output_type="pt")
