"""A card whose allocator's segments cannot grow, as on Windows: plans are made for segments as they are."""

from __future__ import annotations

from typing import Any

import pytest

import tightfit
from simulator.conftest import ACCELERATOR
from tightfit import BudgetTooSmall
from tightfit.devices.device import Device
from tightfit.devices.simulated import SimulatedDevice
from tightfit.run.footprints import Measurer
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, run

pytestmark = pytest.mark.usefixtures("shared_footprints")

MIB = 2**20
CASE = next(case for case in CASES if case.name == "StableDiffusionXL")


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> SimulatedCard:
    monkeypatch.setattr(SimulatedDevice, "use_expandable_segments", Device.use_expandable_segments)
    monkeypatch.setattr(SimulatedDevice, "expandable_refused", lambda self: "a test says so")
    card = SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": 2000 * MIB}), Host(), values="real")
    use_cards([card])
    return card


def fitted_within(pipe: Any, size: int, asked: Request) -> Any:
    return tightfit.fit(pipe, budget=size, request=asked, device="simulated:0")


@pytest.mark.slow
def test_what_is_measured_for_them_is_their_own() -> None:
    pipe, asked = CASE.make(), Request(height=512, width=512, steps=2)
    growing, fixed = (Measurer(pipe, expandable=expandable).measure(asked) for expandable in (True, False))
    assert [phase.peak for phase in growing.phases] == [phase.peak for phase in fixed.phases]
    assert all(phase.allocator_bytes >= phase.peak for phase in fixed.phases)
    assert [phase.allocator_bytes for phase in growing.phases] != [phase.allocator_bytes for phase in fixed.phases]
    assert [way.allocator_bytes for way in growing.phases[-1].strip_options] != [
        way.allocator_bytes for way in fixed.phases[-1].strip_options
    ]


def test_the_least_that_is_said_is_enough(fixed: SimulatedCard) -> None:
    wanted = run(CASE.make(), CASE)
    pipe, call = CASE.make(), CASE.call()
    asked = Request(height=call["height"], width=call["width"], steps=call["num_inference_steps"], batch=2)
    with pytest.raises(BudgetTooSmall) as refused:
        fitted_within(pipe, MIB, asked)
    fitted = fitted_within(pipe, refused.value.facts["needed_bytes"], asked)
    assert not fitted.plan.expandable_segments
    assert "a test says so" in [reason.because for reason in fitted.plan.reasons]
    found = run(pipe, CASE).cpu()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert not fixed.allocator.expandable
    assert not [note for note in fitted.report().trace.notes if "out of memory" in note]


def test_a_plan_that_wants_them_to_grow_says_that_they_do_not(fixed: SimulatedCard) -> None:
    pipe = CASE.make()
    fitted = tightfit.fit(pipe, plan={"expandable_segments": True}, device="simulated:0")
    run(pipe, CASE)
    assert any("cannot: a test says so" in note for note in fitted.report().trace.notes)
