"""Step caches that are calibrated, and plans that choose among them, or fall back to smaller ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tightfit
from tightfit.cli import app
from tightfit.errors import BudgetTooSmall, CacheError, InputError
from tightfit.measure.meta_copy import meta_copy
from tightfit.measure.picture_difference import psnr
from tightfit.plan.default_rates import ANY_CARD, computer_with
from tightfit.run.cache_candidates import candidates_for
from tightfit.run.cache_choice import plan_with_cache
from tightfit.run.calibrated_caches import PipelineIdentity, keep_calibration, with_calibrations
from tightfit.run.calibration import CalibrationStore, PlanningInputs
from tightfit.run.call_arguments import request_of_example
from tightfit.run.footprints import Measurer
from tightfit.run.limits import Limits
from tightfit.run.models import find_model
from tightfit.schema.cache_calibration import CacheCalibration, CacheTrial
from tightfit.schema.results import CallMeasurement
from tightfit.schema.step_cache import StepCache
from tiny_pipelines import CASES, PIXELS

BY_NAME = {case.name: case for case in CASES}
STEPS = 8
CALL: dict[str, Any] = {"num_inference_steps": STEPS}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheCalibration]:
    """A calibration of the tiny Stable Diffusion, kept for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("calibrated")))
        yield tightfit.calibrate(
            pipeline(), [call("a fox"), call("a hen")], strategies=["static", "first-block", "magcache", "teacache"],
            device="cpu", **CALL,
        )  # fmt: skip


def pipeline(name: str = "StableDiffusion") -> Any:
    pipe = BY_NAME[name].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(prompt: str, name: str = "StableDiffusion") -> dict[str, Any]:
    taken = BY_NAME[name].call(PIXELS) | {"prompt": prompt}
    del taken["num_inference_steps"], taken["generator"]  # the tests have their own
    return taken


def draw(pipe: Any, seed: int, prompt: str) -> torch.Tensor:
    arguments = call(prompt) | CALL | {"generator": torch.Generator().manual_seed(seed), "output_type": "pt"}
    pictures: torch.Tensor = pipe(**arguments).images
    return pictures


# trials


@pytest.mark.slow
def test_trials_say_what_calls_with_the_cache_are_like(calibrated: CacheCalibration) -> None:
    assert (calibrated.steps, calibrated.calls) == (STEPS, 2)
    assert {each.cache.strategy for each in calibrated.trials} == {"static", "first-block", "magcache"}  # a U-Net's
    pipe = pipeline()
    plain = [draw(pipe, 0, "a fox"), draw(pipe, 1, "a hen")]
    for trial in calibrated.trials:
        fitted = tightfit.fit(pipe, plan={"device": "cpu", "components": {"unet": {"cache": trial.cache}}})
        ratios, skipped = [], []
        for seed, prompt in enumerate(("a fox", "a hen")):
            pairs = zip(draw(pipe, seed, prompt), plain[seed], strict=True)
            ratios += [psnr(one[None], other[None]) for one, other in pairs]
            skipped.append(fitted.report().trace.caches[0].skipped_steps)
        fitted.undo()
        assert trial.least_psnr == pytest.approx(min(ratios), abs=0.02)
        assert trial.mean_skipped == sum(map(len, skipped)) / 2
        assert trial.skipped_steps
        assert set(trial.skipped_steps) <= {*skipped[0], *skipped[1]}


def test_settings_of_a_strategy_skip_more_and_more(calibrated: CacheCalibration) -> None:
    for strategy in ("static", "first-block"):
        counts = [each.mean_skipped for each in calibrated.trials if each.cache.strategy == strategy]
        assert counts == sorted(counts)
        assert len(set(counts)) > 1


def test_magnitudes_are_those_of_this_network(calibrated: CacheCalibration) -> None:
    magnitudes = next(each.cache.magnitudes for each in calibrated.trials if each.cache.strategy == "magcache")
    assert magnitudes is not None
    assert len(magnitudes) == STEPS
    assert all(0.3 < each < 3 for each in magnitudes)
    assert len(set(magnitudes)) > 2


@pytest.mark.slow
def test_coefficients_of_a_transformer_are_fitted(empty_cache: Path) -> None:
    pipe = pipeline("Flux")
    found = tightfit.calibrate(pipe, [call("a fox", "Flux")], strategies=["teacache"], device="cpu",
                               num_inference_steps=20)  # fmt: skip
    assert found.trials
    assert all(each.cache.coefficients is not None for each in found.trials)
    assert pipe._progress_bar_config == {"disable": True}  # as it was


def test_calls_of_few_steps_have_a_short_warm_up() -> None:
    assert candidates_for("blockdance", [], 8)[0].value("warm_up") == 1
    assert candidates_for("blockdance", [], 60)[0].warm_up is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"calls": []}, "give a list of prompts"),
        ({"calls": "a fox"}, "give a list of prompts"),
        ({"calls": ["a fox"], "strategies": ["statik"]}, "did you mean 'static'"),
        ({"calls": ["a fox"], "strategies": ["text-kv"]}, "changes no picture"),
        ({"calls": ["a fox"], "strategies": ["static"], "num_inference_step": 3}, "did you mean 'num_inference_steps'"),
        ({"calls": ["a fox"], "strategies": ["static"], "device": "cdua"}, "cdua"),
    ],
)
def test_what_calibration_does_not_take(arguments: dict[str, Any], says: str, empty_cache: Path) -> None:
    pipe = pipeline()
    with pytest.raises(InputError, match=says):
        tightfit.calibrate(pipe, **arguments)
    assert not empty_cache.exists() or not list(empty_cache.rglob("cache-calibrations/*"))


# whose calibration it is


def test_a_calibration_is_of_weights(tmp_path: Path) -> None:
    pipe, other = pipeline(), pipeline()
    with torch.no_grad():
        for parameter in other.unet.parameters():
            parameter.mul_(1.1)
    weights = PipelineIdentity(pipe).weights
    calibration = CacheCalibration(weights=weights, calls=1, steps=8, trials=())
    assert len(weights) > 20
    assert calibration.is_of(PipelineIdentity(pipeline().to(torch.bfloat16)).weights)
    assert not calibration.is_of(PipelineIdentity(other).weights)
    pipe.save_pretrained(tmp_path)
    folder = find_model(str(tmp_path))
    assert PipelineIdentity(meta_copy(pipe), folder).weights == weights
    other.unet.to("meta")
    assert not calibration.is_of(PipelineIdentity(other).weights)  # there are none


def test_calibrations_of_other_strategies_are_added(empty_cache: Path) -> None:
    pipe = pipeline()
    identity, limits = PipelineIdentity(pipe), Limits(None, ("step-cache",))
    common = {"least_psnr": 40.0, "mean_psnr": 41.0, "skipped_steps": (2,), "mean_skipped": 1, "device_bytes": 1}
    trials = [
        CacheTrial(cache=StepCache.of(cache), seconds_share=share, **common)
        for cache, share in (("static,interval=2", 0.6), ("meancache,interval=2", 0.5), ("static,interval=3", 0.4))
    ]
    for trial, calls, steps in zip(trials, (3, 2, 4), (8, 8, 8), strict=True):
        keep_calibration(
            identity, CacheCalibration(weights=identity.weights, calls=calls, steps=steps, trials=(trial,))
        )
    keep_calibration(identity, CacheCalibration(weights=identity.weights, calls=1, steps=20, trials=()))
    latest, found = with_calibrations(limits, pipe).calibrations
    assert latest.steps == 20
    assert {each.cache.brief for each in found.trials} == {"static,interval=3", "meancache,interval=2"}
    assert found.calls == 2


# choosing


def choose(pipe: Any, steps: int = STEPS, **limits: Any) -> tuple[StepCache | None, str]:
    fitted = tightfit.fit(
        pipe, allow=["step-cache"], device="cpu", example=call("a fox") | {"num_inference_steps": steps}, **limits
    )
    plan = fitted.plan
    fitted.undo()
    return plan.components["unet"].cache, f"{plan.reasons[-1].decision}: {plan.reasons[-1].because}"


def test_the_fastest_that_keeps_the_quality_is_chosen(calibrated: CacheCalibration) -> None:
    pipe = pipeline()
    ratios = sorted(each.least_psnr or 0.0 for each in calibrated.trials)
    chosen, why = choose(pipe, quality=max(ratios[0] - 1, 0))
    assert chosen is not None
    assert "instead of" in why
    chosen, why = choose(pipe, quality=ratios[-1] + 1)
    assert chosen is None
    assert f"keeps {ratios[-1] + 1:g} dB" in why
    middle = ratios[len(ratios) // 2]
    if (chosen := choose(pipe, quality=middle)[0]) is not None:
        (trial,) = (each for each in calibrated.trials if each.cache == chosen)
        assert trial.within(middle)


def test_other_numbers_of_steps(calibrated: CacheCalibration) -> None:
    pipe = pipeline()
    assert "calibrated for 8 steps, and not for 20" in choose(pipe, steps=20)[1]
    assert calibrated.is_for(10)
    trial = calibrated.trials[0].model_copy(update={"skipped_steps": (4, 7)})
    assert calibrated.skipped_of(trial, 4) == (2,)  # 7 · 4 / 8 is beyond the last


def test_without_a_calibration_there_is_no_cache(empty_cache: Path) -> None:
    assert choose(pipeline()) == (None, "no step cache: none was calibrated for this pipeline: tightfit calibrate does")


def test_each_number_of_steps_is_planned_for(calibrated: CacheCalibration) -> None:
    pipe = pipeline()
    least = min(each.least_psnr or 0.0 for each in calibrated.trials)
    fitted = tightfit.fit(pipe, allow=["step-cache"], quality=max(least - 1, 0), device="cpu")
    cached = []
    for steps in (STEPS, 20, STEPS):
        pipe(**call("a fox") | {"num_inference_steps": steps})
        cached.append(fitted.plan.components["unet"].cache is not None)
    assert cached == [True, False, True]


def test_measured_times_without_a_cache_hold_until_there_are_others(tmp_path: Path, empty_cache: Path) -> None:
    (device,) = computer_with(ANY_CARD).accelerators
    plain, cached = CalibrationStore({"of": "plain"}, device), CalibrationStore({"of": "x"}, device, {"of": "plain"})
    one = CallMeasurement(plan="a", first_call=True, stored={}, phases=())
    other = one.model_copy(update={"plan": "b"})
    assert cached.read() == ()
    plain.add(one)
    assert cached.read() == (one,)
    cached.add(other)
    assert (cached.read(), plain.read()) == ((other,), (one,))


# a cache that a user names


@pytest.mark.parametrize(
    ("size", "chosen", "says"),
    [
        (30, "device", ""),
        (29, "host", "taylorseer keeps on the host what it reuses: with what taylorseer keeps on the device, 30"),
        (20, "host", "taylorseer keeps on the host what it reuses"),
        (19, "none", "no step cache, as taylorseer does not fit"),
        (9, "refused", "10 are needed"),
    ],
)
def test_the_next_smaller_cache_is_used_where_one_does_not_fit(size: int, chosen: str, says: str) -> None:
    cache = StepCache(strategy="taylorseer", interval=3)
    footprint = Measurer(pipeline()).measure(request_of_example(pipeline(), call("a fox")))
    needs = {"device": 30, "host": 20, "none": 10}

    class Sized(PlanningInputs):
        def plan(self, limits: Limits) -> tightfit.Plan:
            needed = needs["none" if self.step_cache is None else self.step_cache.keep_on]
            if size < needed:
                raise BudgetTooSmall(f"{needed} are needed")
            return tightfit.Plan(components={"unet": {"cache": self.step_cache}})

    def inputs_with(each: StepCache | None) -> PlanningInputs:
        (device,) = computer_with(ANY_CARD).accelerators
        return Sized(footprint, computer_with(ANY_CARD), CalibrationStore(None, device), step_cache=each)

    if chosen == "refused":
        with pytest.raises(BudgetTooSmall, match=says):
            plan_with_cache(Limits(None, cache=cache), inputs_with)
        return
    plan, inputs = plan_with_cache(Limits(None, cache=cache), inputs_with)
    kept = plan.components["unet"].cache
    assert inputs.step_cache == kept
    assert ("none" if kept is None else kept.keep_on) == chosen
    assert says in "".join(f"{each.decision}: {each.because}" for each in plan.reasons)


def test_a_cache_that_the_network_does_not_take_is_refused_at_once() -> None:
    with pytest.raises(CacheError, match="teacache is for transformers"):
        tightfit.fit(pipeline(), cache="teacache", device="cpu", request={})


def test_a_plan_takes_a_cache_as_text() -> None:
    plan = tightfit.Plan.from_mapping({"components": {"unet": {"cache": "static,interval=3"}}})
    assert plan.components["unet"].cache == StepCache(strategy="static", interval=3)
    assert StepCache.of(StepCache(strategy="static", interval=3).brief) == plan.components["unet"].cache


# the command line


def test_calibrate_plan_and_run(empty_cache: Path, tmp_path: Path) -> None:
    def run(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    found = run("calibrate", "--strategy", "meancache", "--prompt", "a red circle", "--steps", "8", "--device", "cpu")
    assert [CacheTrial.from_mapping(each).cache.interval for each in found["trials"]] == [2, 3, 4]
    allowed = ["--allow", "step-cache", "--quality", "0", "--steps", "8"]
    planned = run("plan", *allowed)
    out = str(tmp_path / "a.png")
    drawn = run("run", "a red circle", *allowed, "--device", "cpu", "--out", out)
    assert planned["plan"]["components"]["unet"]["cache"]["strategy"] == "meancache"
    assert drawn["plan"]["components"]["unet"]["cache"]["strategy"] == "meancache"
    assert drawn["caches"][0]["skipped_steps"]
    result = CliRunner().invoke(app, ["calibrate", "--strategy", "meancash"])
    assert result.exit_code == 2
    assert "did you mean 'meancache'" in result.stderr
