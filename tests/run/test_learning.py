"""What runs teach: the next plan for the same knows how long they took and what they held, and nothing else does."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

import tightfit
from a_few import a_few
from simulator.conftest import ACCELERATOR
from tightfit import Fitted, Plan, Request, files
from tightfit.catalog.known import known_card, known_model
from tightfit.devices.choose import find_machine
from tightfit.devices.device import Device
from tightfit.measure.build_models import build_known
from tightfit.measure.recorder import Recorder
from tightfit.run import calibration as experiences
from tightfit.run import footprints, replanning
from tightfit.run import predict as forecasts
from tightfit.run.calibration import MOST, CalibrationStore, forget
from tightfit.run.calibration_recorder import CalibrationRecorder
from tightfit.run.call_arguments import Prompt
from tightfit.run.generate import profiled
from tightfit.run.job import Job
from tightfit.run.limits import Limits
from tightfit.run.planning_context import PlannedFolder, machine_now, plan_within
from tightfit.run.predict import forecast
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import ComponentPlan
from tightfit.schema.results import CallMeasurement, PhaseMeasurement, Trace
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES

MIB = 2**20
STEPS = 8
REQUEST = {"height": 64, "width": 64, "steps": STEPS}
BUDGET = 280 * MIB


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "learning"))  # footprints of all tests
    forget()
    yield
    use_cards([])


@pytest.fixture
def pipe() -> Any:
    """Stable Diffusion with 150 MiB of U-Net, on a card that has room for it."""
    torch.manual_seed(0)
    made = next(case for case in CASES if case.name == "StableDiffusion").make()
    config = dict(made.unet.config) | {"block_out_channels": (256, 384), "attention_head_dim": 8, "norm_num_groups": 32}
    parts = made.components | {"unet": UNet2DConditionModel.from_config(config).eval()}
    made = type(made)(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    use_cards([SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": BUDGET}), Host(), values="shapes")])
    return made


def fit(pipe: Any, size: int = BUDGET, **more: Any) -> Fitted:
    return tightfit.fit(pipe, budget=size, request=REQUEST, device="simulated:0", **more)


def call(pipe: Any, **more: Any) -> Any:
    with torch.no_grad():
        return pipe("a fox", **{"height": 64, "width": 64, "num_inference_steps": STEPS, "output_type": "pt"} | more)


def said(plan: Plan) -> list[str]:
    """What was learned, in its words."""
    return [f"{reason.decision}: {reason.because}" for reason in plan.reasons if "measured in" in reason.because]


def kept() -> list[Path]:
    return sorted((files.cache_folder() / "experiences").glob("*"))


def believed_faster(times: float) -> Callable[[Device], Machine]:
    """What a planner is told of a machine: that it computes so many times as fast as it does."""

    def told(target: Device) -> Machine:
        machine = machine_now(target)
        (card,) = machine.accelerators
        assert card.memory_rate
        faster = {
            "arithmetic_rates": {kind: rate * times for kind, rate in card.arithmetic_rates.items()},
            "memory_rate": card.memory_rate * times,
            "launch_overhead": card.launch_overhead / times,
        }
        return machine.model_copy(update={"accelerators": (card.model_copy(update=faster),)})

    return told


def compare(fitted: Fitted) -> dict[str, float]:
    """Phase by phase: what was said to what it took; no peak is above the budget, nor above what was said."""
    told = {phase.name: phase for phase in fitted.plan.forecast}
    phases = fitted.report().trace.phases
    for phase in phases:
        assert phase.peak_bytes <= told[phase.name].peak_bytes <= BUDGET
    return {phase.name: told[phase.name].seconds / phase.seconds for phase in phases}


@pytest.mark.parametrize("times", a_few([0.5, 2.0], "2.0"))
def test_wrong_rates_are_found_out(pipe: Any, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Planned with rates that are wrong by a factor of two, and again after two calls."""
    monkeypatch.setattr(replanning, "machine_now", believed_faster(times))
    first = fit(pipe)
    call(pipe)
    assert not said(first.plan)
    assert compare(first)["denoise"] == pytest.approx(1 / times, rel=0.03)
    call(pipe)
    second = fit(pipe)
    (line,) = (line for line in said(second.plan) if line.startswith("times of denoise are "))
    assert line.endswith(" × what rates say: measured in 1 run on this machine")  # the first call counts no more
    assert float(line.split()[4]) == pytest.approx(times, rel=0.03)
    for _ in range(2):
        call(pipe)
        assert compare(second)["denoise"] == pytest.approx(1.0, rel=0.03)
    third = fit(pipe)
    assert any(line.endswith("measured in 2 runs on this machine") for line in said(third.plan))


@pytest.mark.slow
def test_waiting_for_weights_is_no_slow_arithmetic(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within less than the U-Net takes, it is the link that a step waits for, whatever rates say of arithmetic."""
    monkeypatch.setattr(replanning, "machine_now", believed_faster(2.0))
    for _ in range(2):
        fitted = fit(pipe, 120 * MIB)
        assert fitted.plan.components["unet"].placement == "stream"
        call(pipe)
        assert compare(fitted)["denoise"] == pytest.approx(1.0, rel=0.03)
        call(pipe)
        assert not [line for line in said(fitted.plan) if "denoise" in line]


def test_right_rates_stay(pipe: Any) -> None:
    before = fit(pipe).plan
    for _ in range(2):
        call(pipe)
    after = fit(pipe).plan
    assert not [line for line in said(after) if "denoise" in line]  # the other phases are half a millisecond each
    assert (after.components, after.forecast[1]) == (before.components, before.forecast[1])


@pytest.mark.slow
def test_a_network_that_comes_and_computes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion 1.5 at 512², whose U-Net comes for its phase: only what computes takes twice as long."""
    use_cards(
        [SimulatedCard(0, known_card("rtx3060").model_copy(update={"bytes": 1000 * MIB}), Host(), values="shapes")]
    )
    monkeypatch.setattr(replanning, "machine_now", believed_faster(2.0))
    monkeypatch.setattr(footprints, "fingerprint", lambda pipe: "a stand-in for a tokenizer has none")
    pipe = build_known(known_model("sd-1.5"))
    pipe.set_progress_bar_config(disable=True)
    ratios = []
    for _ in range(2):
        fitted = tightfit.fit(pipe, budget=1000 * MIB, request={"steps": 8}, device="simulated:0")
        assert fitted.plan.components["unet"].placement != "resident"
        for _ in range(2):
            call(pipe, height=512, width=512, num_inference_steps=8)
        (denoise,) = (phase for phase in fitted.report().trace.phases if phase.name == "denoise")
        ratios.append(fitted.plan.forecast[1].seconds / denoise.seconds)
        assert denoise.peak_bytes <= fitted.plan.forecast[1].peak_bytes <= 1000 * MIB
    assert ratios[0] < 0.7
    assert ratios[1] == pytest.approx(1.0, rel=0.03)


def test_a_higher_peak_is_reckoned_with(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that sees more than was said while the network denoises, and yet within the budget."""
    trace, seen_peak = Recorder.trace, 272 * MIB

    def more(self: Recorder) -> Trace:
        seen = trace(self)
        phases = [
            phase.model_copy(update={"peak_bytes": seen_peak}) if phase.name == "denoise" else phase
            for phase in seen.phases
        ]
        return seen.model_copy(update={"phases": tuple(phases)})

    monkeypatch.setattr(Recorder, "trace", more)
    first = fit(pipe)
    call(pipe)
    second = fit(pipe)
    told = [{phase.name: phase.peak_bytes for phase in fitted.plan.forecast} for fitted in (first, second)]
    assert told[0]["denoise"] < seen_peak <= told[1]["denoise"] <= BUDGET
    (line,) = said(second.plan)
    assert line.startswith("denoise takes ")
    assert line.endswith(" MiB more than shapes say: measured in 1 run on this machine")


# what teaches nothing


def test_only_calls_as_they_were_planned_teach(pipe: Any) -> None:
    fit(pipe)
    profiled(lambda: call(pipe))
    assert not kept()  # it was watched
    call(pipe, height=32, width=32)
    assert not kept()  # it asked for less than was planned for

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(pipe, callback_on_step_end=stop)
    assert not kept()  # it did not end
    pipe.vae.decode(torch.zeros(1, 4, 8, 8, device="privateuseone:0"))
    assert not kept()  # it was no call of the pipeline
    call(pipe)
    assert len(kept()) == 1


def test_a_call_that_ran_out_of_memory_teaches_nothing(pipe: Any) -> None:
    use_cards([card := SimulatedCard(0, ACCELERATOR.model_copy(update={"bytes": BUDGET}), Host(), values="shapes")])
    fitted = fit(pipe)

    def shrink(_: Any, step: int, __: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        card.allocator.empty_cache()
        card.allocator.capacity = min(card.allocator.capacity, BUDGET // 2)
        return kwargs

    call(pipe, callback_on_step_end=shrink)
    assert any("planned anew within" in note for note in fitted.report().trace.notes)
    assert not kept()


def test_what_cannot_be_learned_is_no_harm(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(CalibrationRecorder, "ended", failing)
    fit(pipe)
    assert call(pipe).images.shape == (1, 3, 64, 64)


def test_eight_calls_are_enough(pipe: Any) -> None:
    fit(pipe)
    for _ in range(MOST + 2):
        call(pipe, num_inference_steps=1)
    (file,) = kept()
    assert len(json.loads(file.read_text())) == MOST
    assert len(file.read_text()) < 16_000


# where it is kept

QUESTION = {"model": "a", "request": {"height": 64}, "dtype": None}
CARD = ACCELERATOR.model_copy(update={"product_name": "a card"})
LIVED = PhaseMeasurement(
    name="denoise",
    runs=4,
    predicted_seconds=1.0,
    seconds=2.0,
    predicted_bytes=5,
    peak_bytes=4,
    activations=3,
    time_scale=2.0,
)
SEEN = CallMeasurement(plan="a", phases=(LIVED,))


def changed(**fields: Any) -> Accelerator:
    return CARD.model_copy(update=fields)


@pytest.fixture
def _own_mark() -> Iterator[None]:
    yield
    files.code_mark.cache_clear()


@pytest.mark.usefixtures("_own_mark")
@pytest.mark.parametrize("library", ["torch", "diffusers", "transformers"])
def test_nothing_is_trusted_from_another_version(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CalibrationStore(QUESTION, CARD).add(SEEN)
    assert CalibrationStore(QUESTION, CARD).read() == (SEEN,)
    version = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(files, "version", lambda name: version(name) + ".1" * (name == library))
        files.code_mark.cache_clear()
        assert CalibrationStore(QUESTION, CARD).read() == ()
    files.code_mark.cache_clear()
    assert CalibrationStore(QUESTION, CARD).read() == (SEEN,)


@pytest.mark.usefixtures("_own_mark")
def test_nothing_is_trusted_from_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CalibrationStore(QUESTION, CARD).add(SEEN)
    (tmp_path / "own.py").write_text("changed = True")
    monkeypatch.setattr(files, "files", lambda package: tmp_path)
    files.code_mark.cache_clear()
    assert CalibrationStore(QUESTION, CARD).read() == ()


def test_nothing_is_trusted_from_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    CalibrationStore(QUESTION, CARD).add(SEEN)
    others = [
        changed(product_name="another"),
        changed(kind="cuda"),
        changed(compute_capability="9.0"),
        changed(link_rate=1e9),
    ]
    assert [CalibrationStore(QUESTION, other).read() for other in others] == [()] * 4
    assert CalibrationStore(QUESTION | {"dtype": "float16"}, CARD).read() == ()
    assert CalibrationStore(QUESTION, changed(free=7, bytes=8, name="cuda:1")).read() == (
        SEEN,
    )  # how much it has is no matter
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    assert CalibrationStore(QUESTION, CARD).read() == ()


def test_nothing_is_trusted_from_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    CalibrationStore(QUESTION, changed(kind="cpu")).add(SEEN)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert CalibrationStore(QUESTION, changed(kind="cpu")).read() == ()


@pytest.mark.parametrize("content", ["", "{", "[7]", '[{"plan": "a"}]', "7", "[" * 9999, "\udcff"])
def test_what_cannot_be_read_is_no_experience(content: str) -> None:
    past = CalibrationStore(QUESTION, CARD)
    past.add(SEEN)
    (file,) = kept()
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert past.read() == ()
    past.add(SEEN)
    assert past.read() == (SEEN,)


def test_the_last_eight_are_kept_and_can_be_forgotten() -> None:
    past = CalibrationStore(QUESTION, CARD)
    for number in range(MOST + 3):
        past.add(SEEN.model_copy(update={"plan": str(number)}))
    assert [each.plan for each in past.read()] == [str(number) for number in range(3, MOST + 3)]
    forget()
    assert past.read() == ()
    forget()


def test_what_cannot_be_written_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    CalibrationStore(QUESTION, CARD).add(SEEN)
    assert CalibrationStore(QUESTION, CARD).read() == ()
    forget()


def test_of_what_has_no_mark_nothing_is_kept() -> None:
    CalibrationStore(None, CARD).add(SEEN)
    assert not kept()


# the command line


def from_disk(*wanted: Any) -> PlannedFolder:
    """What `plan_within` makes, with everything streaming from the disk: a tiny model never has to."""
    made = plan_within(*wanted)
    parts = {name: part.model_copy(update={"offload_to": "disk"}) for name, part in made.plan.components.items()}
    parts["unet"] = ComponentPlan(placement="stream", offload_to="disk")
    return made._replace(plan=made.plan.model_copy(update={"components": parts}))


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_plan_knows_what_run_has_seen(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """On this computer's CPU, whose rates nobody measured."""
    here = find_machine()
    monkeypatch.setattr(forecasts, "_own_machine", lambda say: here)
    asked, limits = Request(height=64, width=64, steps=STEPS), Limits(Budget(ram="20GB"))
    job = Job(Prompt("a fox", 1), asked, choices={}, limits=limits, model=str(tiny_model), device="cpu", out=tmp_path)
    job.prepare()
    if store == "disk":
        monkeypatch.setattr("tightfit.run.run_target.plan_within", from_disk)
    job.load()
    assert {part.offload_to for part in job.fitted.plan.components.values()} == {store}
    job.run()
    (file,) = kept()
    (seen,) = json.loads(file.read_text())
    assert seen["first_call"]
    assert [phase["name"] for phase in seen["phases"]] == ["encode", "denoise", "decode"]
    taught = next(phase for phase in seen["phases"] if phase["name"] == "denoise")
    taught["time_scale"] = 3.0  # whatever it was
    file.write_text(json.dumps([seen]))

    def predicted(card: str | None) -> tuple[float, list[str]]:
        prediction = forecast(str(tiny_model), card, {}, asked, lambda what: nullcontext(), Limits(None))
        (denoise,) = (phase for phase in prediction.trace.phases if phase.name == "denoise")
        return denoise.seconds, said(prediction.plan)

    seconds, words = predicted(None)
    assert words == ["times of denoise are 3 × what rates say: measured in 1 run on this machine"]
    assert predicted("rtx4090")[1] == []
    experiences.forget()
    plain, silence = predicted(None)
    assert not silence
    assert seconds == pytest.approx(3 * plain, rel=0.02)
