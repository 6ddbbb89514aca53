"""tightfit.fit(pipe, budget=…) on pretend cards of that size: it fits, takes as long as was said, changes no number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from pretend.conftest import ACCELERATOR
from tightfit import Budget, BudgetTooSmall, InputError, PlanError
from tightfit.catalog.known import known_card, known_model
from tightfit.measure.building import build_known
from tightfit.pretend.backend import use_cards
from tightfit.pretend.card import Card
from tightfit.pretend.clock import Host
from tightfit.records import Accelerator, Trace
from tightfit.run.footprints import measure_footprint
from tightfit.run.request import Prompt, call_arguments
from tiny_pipelines import CASES, TinyCase, run

MIB = 2**20
REQUEST = tightfit.Request(height=256, width=256, steps=4)
NAMES = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}
TINY = [case for case in CASES if case.name in ("StableDiffusionXL", "Flux")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "footprints"))  # for all of this file
    yield
    use_cards([])


def card_of(size: int, like: Accelerator, values: Any = "shapes") -> None:
    use_cards([Card(0, like.model_copy(update={"bytes": size}), Host(), values=values)])


def called(fitted: Any, pipe: Any) -> Trace:
    with torch.no_grad():
        pipe(**call_arguments(pipe, Prompt("a fox", seed=0), REQUEST) | {"output_type": "pt"})
    trace: Trace = fitted.report().trace
    return trace


@pytest.mark.parametrize("mib", [260, 1000])
def test_a_card_of_that_size_is_enough_and_steps_take_what_was_said(mib: int) -> None:
    card_of(mib * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, budget=mib * MIB, request=REQUEST, device="pretend:0")
    assert fitted.plan.lossless
    trace = called(fitted, pipe)
    assert not [note for note in trace.notes if "memory" in note]
    told = {phase.name: phase for phase in fitted.plan.forecast}
    for phase in trace.phases:
        assert phase.peak_bytes <= told[phase.name].peak_bytes <= mib * MIB
    (denoise,) = (phase for phase in trace.phases if phase.name == "denoise")
    assert told["denoise"].seconds == pytest.approx(denoise.seconds, rel=0.03)
    fitted.undo()


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_numbers_are_those_of_the_untouched_pipeline(case: TinyCase) -> None:
    wanted = run(case.make(), case)
    card_of(96 * MIB, ACCELERATOR, "real")
    pipe = case.make()
    asked = {ours: case.call()[theirs] for theirs, ours in NAMES.items() if theirs in case.call()}
    fitted = tightfit.fit(pipe, budget="96MiB", request=asked, device="pretend:0")
    assert fitted.plan.growing_segments
    found = run(pipe, case).cpu()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    fitted.undo()
    assert torch.equal(run(pipe, case), wanted)


def test_a_second_budget_replaces_the_first_and_a_small_one_is_refused() -> None:
    card_of(4000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    first = tightfit.fit(pipe, budget="3GiB", request=REQUEST, device="pretend:0")
    assert {part.placement for part in first.plan.components.values()} == {"resident"}
    second = tightfit.fit(pipe, budget=Budget(device="500MiB"), request=REQUEST, device="pretend:0")
    assert not first.fitted
    assert second.plan.components["unet"].placement == "per-unit"
    with pytest.raises(
        BudgetTooSmall, match=r"StableDiffusionPipeline cannot do 256×256 within 100 MiB on .* MiB would"
    ):
        tightfit.fit(pipe, budget="100MiB", request=REQUEST, device="pretend:0")


def test_a_plan_is_a_file(tmp_path: Path) -> None:
    card_of(4000 * MIB, known_card("rtx3060"))
    pipe = build_known(known_model("sd-1.5"))
    plan = tightfit.fit(pipe, budget="500MiB", request=REQUEST, device="pretend:0").plan
    file = tmp_path / "plan.yaml"
    file.write_text(plan.to_yaml())
    again = tightfit.fit(pipe, plan=file, device="pretend:0").plan
    assert again.components == plan.components
    assert (again.vae, again.budget, again.forecast) == (plan.vae, plan.budget, plan.forecast)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({}, "exactly one of budget"),
        ({"budget": "8GB", "level": 1}, "budget=8GB, level=1"),
        ({"level": 1, "ram": "4GB"}, "ram=4GB"),
        ({"budget": "8GB", "device": "cpu"}, "which cpu has not"),
        ({"budget": Budget(device="8GB", ram="1GB"), "ram": "2GB"}, "leave one out"),
    ],
)
def test_what_is_illegal_is_refused(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        tightfit.fit(TINY[0].make(), **wanted)


def test_a_budget_is_a_size_and_for_a_pipeline() -> None:
    with pytest.raises(InputError, match="'8 GBit' is not a size"):
        tightfit.fit(TINY[0].make(), budget="8 GBit")
    with pytest.raises(PlanError, match="a budget is for a whole pipeline"):
        tightfit.fit(torch.nn.Linear(2, 2), budget="1GB")


def test_ways_are_in_the_footprint() -> None:
    (decode,) = (phase for phase in measure_footprint("sd-1.5", REQUEST).phases if phase.name == "decode")
    assert {way.maps for way in decode.ways} == {"device", "host"}
    assert all(way.room < decode.room for way in decode.ways)
    on_device = [way for way in decode.ways if way.maps == "device"]
    assert [way.room for way in on_device] == sorted((way.room for way in on_device), reverse=True)
    assert [way.kernels for way in on_device] == sorted(way.kernels for way in on_device)
