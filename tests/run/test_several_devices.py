"""Components on several simulated cards: the numbers of one card, each within its budget, and what happens beyond."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from PIL import Image

import tightfit
from a_few import a_few
from run.test_shrinking import MIB, REQUEST, draw, large_unet, shrink
from simulator.conftest import ACCELERATOR
from tightfit import Budget, BudgetTooSmall, InputError, PlanError
from tightfit.catalog.known import known_card, known_model
from tightfit.devices.simulated import SimulatedDevice
from tightfit.measure.build_models import build_known
from tightfit.measure.modules import find_components, find_role
from tightfit.report.prediction import describe
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.limits import limits_of
from tightfit.run.predict import forecast
from tightfit.schema.machine import Accelerator
from tightfit.schema.results import Prediction
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, TinyCase, run

pytestmark = pytest.mark.usefixtures("shared_footprints")

ONE, OTHER = "simulated:0", "simulated:1"


def cards_of(*sizes: int, like: Accelerator = ACCELERATOR, values: Any = "real") -> list[SimulatedCard]:
    host = Host()
    cards = [
        SimulatedCard(i, like.model_copy(update={"bytes": size}), host, values=values) for i, size in enumerate(sizes)
    ]
    use_cards(cards)
    return cards


def apart(pipe: Any, placement: str) -> dict[str, Any]:
    """All but denoisers on the other card."""
    parts = find_components(pipe).items()
    elsewhere = {
        name: {"device": OTHER, "placement": placement} for name, part in parts if find_role(name, part) != "denoiser"
    }
    return {"device": ONE, "components": elsewhere}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("placement", ["resident", "offload", "stream"])
@pytest.mark.parametrize(
    "case", a_few(CASES, "StableDiffusion3", "StableDiffusionXL", "FluxImg2Img", "WanImageToVideo")
)
def test_numbers_are_those_of_one_card(case: TinyCase, placement: str) -> None:
    cards_of(2**40, 2**40)
    together = tightfit.fit(pipe := case.make(), level=0, device=ONE)
    wanted = run(pipe, case).cpu()
    together.undo()
    fitted = tightfit.fit(pipe, plan=apart(pipe, placement))
    assert fitted.plan.devices == (ONE, OTHER)
    assert torch.equal(run(pipe, case).cpu(), wanted)
    trace = fitted.report().trace
    assert max(phase.other_devices[OTHER] for phase in trace.phases) > 0
    fitted.undo()
    assert all(tensor.device.type == "cpu" for part in find_components(pipe).values() for tensor in part.parameters())


@pytest.mark.parametrize(("first", "second"), [(1500, 1500), pytest.param(300, 400, marks=pytest.mark.slow)])
def test_cards_of_that_size_are_enough_and_steps_take_what_was_said(first: int, second: int) -> None:
    cards_of(first * MIB, second * MIB, like=known_card("rtx3060"), values="shapes")
    pipe, asked = build_known(known_model("sd-1.5")), tightfit.Request(height=256, width=256, steps=4)
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, budget={ONE: first * MIB, OTHER: second * MIB}, request=asked)
    assert len(fitted.plan.devices) == 2
    with torch.no_grad():
        pipe(**call_arguments(pipe, Prompt("a fox", seed=0), asked) | {"output_type": "pt"})
    report, told = fitted.report(), {phase.name: phase for phase in fitted.plan.forecast}
    assert not [note for note in report.trace.notes if "memory" in note]
    for phase in report.trace.phases:
        assert phase.peak_bytes <= told[phase.name].peak_bytes
        for name, peak in phase.other_devices.items():
            assert peak <= told[phase.name].other_devices[name] <= fitted.plan.budget.devices[name]  # type: ignore[union-attr]
    (denoise,) = (phase for phase in report.trace.phases if phase.name == "denoise")
    assert told["denoise"].seconds == pytest.approx(denoise.seconds, rel=0.03)
    assert "budget of simulated:0" in str(report)
    assert "budget of simulated:1" in str(report)


@pytest.mark.slow
def test_more_pictures_are_planned_for_and_denoisers_stay_where_they_are() -> None:
    cards_of(250 * MIB, 250 * MIB)
    fitted = tightfit.fit(pipe := large_unet(), budget={ONE: "250MiB", OTHER: "250MiB"}, request=REQUEST)
    before = fitted.plan
    draw(pipe, num_images_per_prompt=4)
    assert fitted.plan.request.batch == 4  # type: ignore[union-attr]
    assert fitted.plan.device == before.device
    assert any(note.startswith("planned anew for 64×64, 4 at once") for note in fitted.report().trace.notes)


def test_a_card_that_shrinks_changes_no_picture() -> None:
    cards_of(2**40)
    together = tightfit.fit(pipe := large_unet(), level=0, device=ONE)
    wanted = draw(pipe)
    together.undo()
    card, _ = cards_of(290 * MIB, 290 * MIB)
    fitted = tightfit.fit(pipe, budget={ONE: "290MiB", OTHER: "290MiB"}, request=REQUEST)
    assert torch.equal(draw(pipe, shrink(card, 0.5, 1)), wanted)
    assert any("planned anew within" in note for note in fitted.report().trace.notes)


def test_another_card_that_shrinks_hands_its_work_over() -> None:
    _, card = cards_of(1500 * MIB, 1500 * MIB, like=known_card("rtx3060"), values="shapes")
    pipe, asked = build_known(known_model("sd-1.5")), tightfit.Request(height=256, width=256, steps=4)
    pipe.set_progress_bar_config(disable=True)
    fitted = tightfit.fit(pipe, budget={ONE: "1500MiB", OTHER: "1500MiB"}, request=asked)
    assert fitted.plan.device_of("vae") == OTHER
    happening = shrink(card, 0.95, 1)

    def step_done(_: Any, step: int, __: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        happening(step)
        return kwargs

    arguments = call_arguments(pipe, Prompt("a fox", seed=0), asked) | {"output_type": "pt"}
    with torch.no_grad():
        pipe(**arguments | {"callback_on_step_end": step_done})
    assert fitted.plan.device_of("vae") == ONE
    said = next(note for note in fitted.report().trace.notes if "planned anew" in note)
    assert "went on after 4 passes that were done" in said  # the prompts' two, and two steps': blocks ran there, too
    assert fitted.plan.budget.devices[OTHER] < 75 * MIB  # type: ignore[union-attr]


def test_pictures_to_start_from_cross_to_their_autoencoder_and_back() -> None:
    cards_of(2**40, 2**40)
    case = next(case for case in CASES if case.name == "StableDiffusion")
    pipe = StableDiffusionImg2ImgPipeline(**case.make().components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    picture = Image.linear_gradient("L").convert("RGB").resize((64, 64))

    def drawn() -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            found = pipe("a fox", image=picture, num_inference_steps=2, output_type="pt")
        return found.images.cpu()

    together = tightfit.fit(pipe, level=0, device=ONE)
    wanted = drawn()
    together.undo()
    tightfit.fit(pipe, plan=apart(pipe, "offload"))
    assert torch.equal(drawn(), wanted)


def test_parts_that_are_called_by_themselves_cross_too() -> None:
    cards_of(2**40, 2**40)
    case = next(case for case in CASES if case.name == "StableDiffusion")
    pipe = case.make()
    wanted = pipe.vae.post_quant_conv(torch.ones(1, 4, 8, 8))
    tightfit.fit(pipe, plan=apart(pipe, "offload"))
    here = SimulatedDevice(0).torch_device
    found = pipe.vae.post_quant_conv(torch.ones(1, 4, 8, 8, device=here))
    assert found.device == here
    assert torch.equal(found.cpu(), wanted)
    assert pipe.vae.device == here  # all that a pipeline holds is there


def forecasted(card: str, choices: dict[str, Any] | None = None, budget: str | None = None) -> Prediction:
    asked, limits = tightfit.Request(height=256, width=256, steps=2), limits_of(budget, None, [], {})
    return forecast("sd-1.5", card, choices or {}, asked, lambda what: nullcontext(), limits, simulated=True)


@pytest.mark.slow
def test_what_several_known_cards_would_do_is_rehearsed() -> None:
    told = forecasted("rtx3060, RTX 3060", budget="rtx3060=1500MiB,rtx3060#2=1GiB")
    assert told.fits
    assert told.card == "rtx3060 and rtx3060#2"
    assert told.plan.devices == ("rtx3060", "rtx3060#2")
    assert (told.capacity, told.other_devices) == (1500 * MIB, {"rtx3060#2": 1024 * MIB})
    assert max(phase.other_devices["rtx3060#2"] for phase in told.trace.phases) <= 1024 * MIB
    assert "rtx3060#2 holds at most" in describe(told)
    foreseen = sum(phase.seconds for phase in told.plan.forecast)
    assert foreseen == pytest.approx(told.trace.seconds, rel=0.1)


@pytest.mark.slow
def test_one_card_may_be_named_too() -> None:
    assert forecasted("rtx3060", budget="rtx3060=700MiB") == forecasted("rtx3060", budget="700MiB")


def test_levels_are_rehearsed_on_several_cards_too() -> None:
    told = forecasted("rtx3060,gtx1650", {"level": 2, "components": {"vae": {"device": "gtx1650"}}})
    assert told.plan.device_of("vae") == "gtx1650"
    assert told.plan.device_of("unet") == "rtx3060"
    assert told.fits


@pytest.mark.parametrize(
    ("card", "budget", "said"),
    [
        (
            "rtx3060,rtx4060",
            "6GB",
            r"6000000000 bytes of which card\? .* --budget rtx3060=6GB,rtx4060=6GB",
        ),
        ("rtx3060,rtx4060", "rtx3060=6GB,rtx4061=1GB", "unknown card 'rtx4061': did you mean 'rtx4060'"),
        ("rtx3060", "rtx3060=6GB,rtx4060=1GB", "unknown card 'rtx4060'"),
        ("rtx3060,rtx4061", None, "unknown card 'rtx4061'"),
        ("rtx3060,rtx4060", "rtx3060=6GB,1GB", "is not DEVICE=SIZE,DEVICE=SIZE, e.g. cuda:0=10GB,cuda:1=8GB"),
    ],
)
def test_unclear_questions_are_answered(card: str, budget: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        forecasted(card, budget=budget)


def test_a_plan_for_several_cards_goes_through_a_file(tmp_path: Any) -> None:
    cards_of(2**40, 2**40)
    pipe = CASES[0].make()
    wanted = tightfit.fit(pipe, plan=apart(pipe, "resident")).plan
    file = tmp_path / "plan.yaml"
    file.write_text(wanted.to_yaml())
    assert tightfit.fit(pipe, plan=file).plan == wanted


def test_devices_may_be_called_by_their_kind() -> None:
    cards_of(2**40, 2**40)
    fitted = tightfit.fit(CASES[0].make(), plan={"device": OTHER, "components": {"vae": {"device": "simulated"}}})
    assert fitted.plan.device_of("vae") == ONE
    fitted = tightfit.fit(CASES[0].make(), plan={"device": ONE, "components": {"vae": {"device": "simulated"}}})
    assert fitted.plan.devices == (ONE,)


def test_too_little_for_both_is_refused_before_anything_is_changed() -> None:
    cards_of(250 * MIB, 250 * MIB)
    pipe = large_unet()
    with pytest.raises(BudgetTooSmall, match="cannot do 64×64 within 40 MiB on simulated:0 and 41 MiB on simulated:1"):
        tightfit.fit(pipe, budget={ONE: "40MiB", OTHER: "41MiB"}, request=REQUEST)
    assert not hasattr(pipe, "tightfit")


@pytest.mark.parametrize(
    ("wishes", "error", "said"),
    [
        ({"budget": {ONE: "1GB", "simulated:7": "1GB"}}, InputError, "simulated:7"),
        ({"budget": {ONE: "1GB", "cpu": "1GB"}}, PlanError, "for cards: cpu is none"),
        ({"budget": {}}, PlanError, "a budget needs device bytes"),
        ({"budget": {ONE: "1GB", OTHER: "much"}}, InputError, "much"),
        ({"budget": {ONE: "1GB", OTHER: "1GB"}, "device": "cpu"}, PlanError, "cannot compute on cpu"),
        ({"plan": {"device": "loopback", "components": {"vae": {"device": ONE}}}}, PlanError, "loopback is none"),
    ],
)
def test_what_cannot_be_is_said(wishes: dict[str, Any], error: type[Exception], said: str) -> None:
    cards_of(2**40, 2**40)
    pipe = CASES[0].make()
    with pytest.raises(error, match=said):
        tightfit.fit(pipe, **wishes)
    assert not [part for part in find_components(pipe).values() if type(part).__name__ == "Disguise"]


def test_one_device_or_several_but_not_both() -> None:
    with pytest.raises(PlanError, match="are named beside it"):
        Budget(device="1GB", devices={ONE: "1GB"})
