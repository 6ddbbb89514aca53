"""Pipelines made of the class, or as a copy, of one that follows a plan: they share its components, and no more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest

import tightfit
from inspection import assert_same, imprint, relative_error
from simulator.conftest import MakeCards
from tiny_pipelines import CASES, TinyCase, run

MIB = 2**20
SD: TinyCase = next(case for case in CASES if case.name == "StableDiffusion")
TWINS: dict[str, Callable[[Any], Any]] = {
    "of its class": lambda pipe: type(pipe)(**pipe.components, requires_safety_checker=False),
    "copied": copy.copy,
}


@pytest.mark.parametrize("wish", [{"budget": 512 * MIB}, {"level": 3}], ids=["budget", "level"])
@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_a_twin_gives_the_same_picture_before_undo_and_after(
    twin: Callable[[Any], Any], wish: dict[str, Any], make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.run.footprints.measure_variants", lambda footprint, play: ())
    make_cards(capacity=512 * MIB)
    pipe: Any = SD.make()
    wanted, before = run(pipe, SD), imprint(pipe)
    fitted = tightfit.fit(pipe, device="simulated:0", **wish)
    other = twin(pipe)
    other.set_progress_bar_config(disable=True)
    assert vars(other)["unet"] is pipe.unet
    assert type(other).__mro__ == diffusers.StableDiffusionPipeline.__mro__
    for each in (other, pipe, other):
        assert relative_error(run(each, SD).cpu(), wanted) < 1e-5
    fitted.undo()
    assert_same(before, imprint(pipe))
    for each in (other, pipe):
        assert relative_error(run(each, SD).cpu(), wanted) == 0


def test_a_network_made_of_the_class_of_one_that_follows_a_plan_follows_none() -> None:
    pipe: Any = SD.make()
    tightfit.fit(pipe, device="loopback", level=3)
    made = type(pipe.unet).from_config(pipe.unet.config)
    assert type(made).__mro__ == diffusers.UNet2DConditionModel.__mro__
