"""`tightfit compare`: the same prompt with lossy techniques and without, and how much the pictures differ."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from tightfit import BudgetTooSmall, InputError, Plan, cli
from tightfit.measure.picture_difference import psnr, ssim
from tightfit.run import comparison, run_target
from tightfit.run.limits import Limits
from tightfit.run.plan_changes import lossless_choices
from tightfit.run.prompt import Prompt
from tightfit.run.run_target import RunOptions
from tightfit.schema.request import Request
from tiny_pipelines import CASES

SMALL = ("--height", "64", "--width", "64", "--steps", "4", "--seed", "1", "--device", "cpu")
CACHE = ("--set", "components.unet.cache.strategy=static")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def tightfit_(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def compare(*words: object) -> Any:
    """What `tightfit compare --json` prints, which must go well."""
    result = tightfit_("compare", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout.splitlines()[-1])


def refused(*words: object) -> str:
    """The one line of `tightfit compare` on wrong input, which leaves no file."""
    result = tightfit_("compare", *words)
    assert result.exit_code == 2, result.output
    assert not list(Path().iterdir())
    (line,) = result.stderr.splitlines()
    return str(line)


def pixels(path: Path) -> torch.Tensor:
    with Image.open(path) as picture:
        return torch.from_numpy(np.asarray(picture, dtype=np.float64) / 255).permute(2, 0, 1)[None]


# what is measured


def test_the_numbers_are_those_of_the_pictures_that_run_draws(tiny_model: Path) -> None:
    printed = compare(tiny_model, "a fox", *SMALL, *CACHE, "--batch", 2, "--out", "both.png")
    for name, words in (("plain", ()), ("lossy", CACHE)):
        made = tightfit_("run", tiny_model, "a fox", *SMALL, *words, "--batch", 2, "--out", f"{name}.png")
        assert made.exit_code == 0, made.output
    for number, said in enumerate(printed["pictures"]):
        pair = pixels(Path(f"plain-{number}.png")), pixels(Path(f"lossy-{number}.png"))
        assert (said["psnr"], said["ssim"]) == pytest.approx((psnr(*pair), ssim(*pair)))
        assert 10 < said["psnr"] < 100
    assert printed["mean"]["psnr"] == pytest.approx(sum(each["psnr"] for each in printed["pictures"]) / 2)


def test_one_call_is_lossy_and_the_other_is_not(tiny_model: Path) -> None:
    printed = compare(tiny_model, "a fox", *SMALL, "--cache", "static", "--out", "both.png")
    plain, lossy = printed["reference"], printed["lossy"]
    assert (plain["lossless"], lossy["lossless"]) == (True, False)
    assert lossy["lossy"] == ["step-cache: static in unet"]
    assert (plain["caches"], lossy["caches"][0]["skipped_steps"]) == ([], [1])
    assert min(each["measured"]["seconds"] for each in (plain, lossy)) > 0
    assert min(each["measured"]["peak_bytes"] for each in (plain, lossy)) > 0
    assert (printed["seed"], printed["outputs"], printed["notes"]) == (1, ["both.png"], [])


def test_the_picture_has_both_side_by_side_and_says_how_they_were_made(tiny_model: Path) -> None:
    result = tightfit_("compare", tiny_model, "a fox", *SMALL, *CACHE, "--out", "both.png")
    assert result.exit_code == 0, result.output
    assert [path.name for path in Path().iterdir()] == ["both.png"]
    assert result.stdout.splitlines()[-1] == "wrote both.png"
    assert "step-cache: static in unet, 1 of 4 steps skipped" in result.stdout
    with Image.open("both.png") as picture:
        assert picture.width > 3 * 320
        assert picture.height > 320
        said = picture.text  # type: ignore[attr-defined]
    assert (said["prompt"], said["seed"], said["model"], said["Software"]) == ("a fox", "1", "tiny", "tightfit")
    assert Plan.from_text(said["plan"]).components["unet"].cache is not None
    assert Plan.from_text(said["reference"]).lossless


def test_a_name_is_made_from_the_prompt_and_none_is_overwritten(tiny_model: Path) -> None:
    names = [compare(tiny_model, "a fox", *SMALL, *CACHE)["outputs"] for _ in range(2)]
    assert names == [["compared-a-fox.png"], ["compared-a-fox-2.png"]]


@pytest.mark.slow
def test_identical_pictures_are_called_so(tiny_model: Path) -> None:
    printed = compare(tiny_model, "a fox", *SMALL, "--cache", "first-block,threshold=0", "--out", "both.png")
    assert printed["pictures"] == [{"psnr": None, "ssim": 1.0, "identical": True}]
    assert printed["lossy"]["lossless"] is True


def test_eight_bits_and_tiles_are_left_out_of_the_other_call_and_the_level_is_kept(tiny_model: Path) -> None:
    words = ("--level", 3, "--set", "vae.tile=32", "--set", "components.unet.storage=float8_e4m3fn")
    printed = compare(tiny_model, "a fox", *SMALL[:-1], "loopback", *words, "--out", "both.png")
    assert len(printed["lossy"]["lossy"]) == 2
    plain = Plan.from_mapping(printed["reference"]["plan"])
    assert plain.lossless
    assert (plain.level, plain.vae.tile, plain.components["unet"].placement) == (3, None, "stream")
    assert not printed["pictures"][0]["identical"]


def test_a_budget_holds_for_both_calls(tiny_model: Path) -> None:
    words = ("--budget", "150MB", "--cache", "static", "--out", "both.png")
    printed = compare(tiny_model, "a fox", *SMALL[:-1], "loopback", *words)
    for each in (printed["reference"], printed["lossy"]):
        assert each["plan"]["budget"]["device"] == 150_000_000
        assert each["measured"]["peak_bytes"] <= 150_000_000
    assert printed["notes"] == []


def test_where_the_budget_is_too_small_without_the_other_call_has_all_free_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_within = run_target.plan_within

    def refusing(path: Path, request: Any, plan_target: Any, dtype: str) -> Any:
        limits: Limits = plan_target.limits
        if limits.budget is not None and limits.cache is None:
            raise BudgetTooSmall("needs 151 MB")
        return plan_within(path, request, plan_target, dtype)

    monkeypatch.setattr(run_target, "plan_within", refusing)
    words = ("--budget", "150MB", "--cache", "static", "--out", "both.png")
    printed = compare(tiny_model, "a fox", *SMALL[:-1], "loopback", *words)
    assert printed["notes"] == ["the lossless call had all free memory instead of a budget: needs 151 MB"]
    plans = printed["reference"]["plan"], printed["lossy"]["plan"]
    assert (plans[0]["budget"], plans[0]["device"], plans[1]["budget"]["device"]) == (None, "loopback", 150_000_000)


def test_each_picture_of_a_batch_has_its_row_and_nine_are_shown(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(comparison, "write_sheet", lambda made, rows, *_: shown.extend(rows))
    printed = compare(tiny_model, "a fox", *SMALL, *CACHE, "--batch", 10, "--out", "both.png")
    assert [row.label for row in shown] == [f"seed {seed}" for seed in range(1, 10)]
    assert len(printed["pictures"]) == 10
    assert printed["notes"] == ["the picture shows the first 9 rows of 10"]


def test_a_video_has_the_mean_over_its_frames_and_shows_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == "Wan")
    case.make().save_pretrained(tmp_path / "wan", safe_serialization=True)
    shown = []
    write_sheet = comparison.write_sheet

    def watching(made: Any, rows: Any, path: Path, metadata: Any) -> None:
        shown.extend(rows)
        write_sheet(made, rows, path, metadata)

    monkeypatch.setattr(comparison, "write_sheet", watching)
    words = ("--height", 32, "--width", 32, "--frames", 9, "--steps", 4, "--seed", 1, "--device", "cpu")
    cache = ("--set", "components.transformer.cache={strategy: static, warm_up: 0}")
    printed = compare(tmp_path / "wan", "a fox", *words, *cache, "--out", "both.png")
    assert [row.label for row in shown] == ["frame 1 of 9", "frame 5 of 9", "frame 9 of 9"]
    (video,) = printed["pictures"]
    frames = [row.difference for row in shown]
    assert min(each.ssim for each in frames) - 0.2 < video["ssim"] < 1
    assert not video["identical"]


# what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "with the defaults, nothing changes the pictures: add what is lossy, e.g. --cache first-block or"),
        (("--cache", "text-kv"), "with all free memory, step cache text-kv, nothing changes the pictures: add"),
        (("--level", 0), "with level=0, nothing changes the pictures: add"),
        (("--budget", "1GB"), "with a budget of 954 MiB, nothing changes the pictures: add"),
        (
            ("--budget", "8GB", "--allow", "fp8"),
            "a budget of 7.45 GiB, allow=fp8, the plan is lossless, with nothing to",
        ),
        (("--cache", "first-blok"), "unknown step cache 'first-blok': did you mean 'first-block'?"),
        (("--allow", "fp9"), "unknown technique 'fp9': did you mean 'fp8'?"),
        ((*CACHE, "--out", "a.jpg"), "--out a.jpg must be a .png file or a folder that exists"),
        ((*CACHE, "--out", "none/a.png"), "cannot write none/a.png"),
        ((*CACHE, "--dtype", "float61"), "unknown dtype 'float61': did you mean 'float16'?"),
        ((*CACHE, "--height", 63), "height 63 is not a multiple of 4, as this model needs: 60 or 64 would do"),
        ((*CACHE, "--set", "components.unit.storage=as-loaded"), "did you mean 'unet'?"),
        ((*CACHE, "more words"), "compare takes [MODEL] PROMPT, not 3 words"),
    ],
)
def test_wrong_input_is_one_line_and_no_file(tiny_model: Path, words: tuple[object, ...], said: str) -> None:
    assert said in refused(tiny_model, "a fox", *SMALL[4:], *words)


def test_ranks_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "one process, not on 2 ranks: start it without torchrun" in refused(tiny_model, "a fox", *SMALL, *CACHE)


def test_what_is_no_picture_is_refused_after_the_first_call(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = [], comparison.generate

    def sound(*given: Any) -> Any:
        calls.append(given)
        return comparison.Result([np.zeros(9)], made(*given).report)

    monkeypatch.setattr(comparison, "generate", sound)
    said = refused(tiny_model, "a fox", *SMALL, *CACHE)
    assert "compare takes pictures and videos, and this pipeline returns ndarray" in said
    assert len(calls) == 1


def test_a_failed_second_call_leaves_no_file(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = [], comparison.generate

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("no power")
        return made(*given)

    monkeypatch.setattr(comparison, "generate", failing)
    result = tightfit_("compare", tiny_model, "a fox", *SMALL, *CACHE, "--out", "both.png")
    assert (result.exit_code, result.stderr) == (1, "tightfit: RuntimeError: no power\n")
    assert not list(Path().iterdir())


# parts


def test_the_model_of_the_first_call_is_freed_before_the_second_is_loaded(
    tiny_model: Path, tmp_path: Path, first_is_gone: Callable[[Any], None]
) -> None:
    options = RunOptions({"components": {"unet": {"cache": {"strategy": "static"}}}}, None, "cpu")
    job = comparison.ComparisonJob(
        Prompt("a fox", 1), Request(height=64, width=64, steps=2), options, str(tiny_model), tmp_path / "both.png"
    )
    job.prepare()
    job.plan()
    job.load("lossy")
    first_is_gone(job)


@pytest.fixture
def first_is_gone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def check(job: Any) -> None:
        gone = weakref.ref(job._loaded.pipe.unet)
        seen: list[Any] = []
        load = run_target.RunTarget.load

        def looking(*given: Any, **named: Any) -> Any:
            seen.append(gone())
            return load(*given, **named)

        monkeypatch.setattr(run_target.RunTarget, "load", looking)
        job.draw("lossy")
        job.load("lossless")
        assert seen == [None]

    return check


@pytest.mark.parametrize(
    "fields",
    [
        {"components": {"unet": {"storage": "float8_e4m3fn", "skip_patterns": ["norm"], "compute_dtype": "float32"}}},
        {"components": {"unet": {"attention": "sage"}}},
        {"components": {"unet": {"cache": {"strategy": "static"}}}},
        {"level": 2, "vae": {"tile": 256, "overlap": 0.5}},
    ],
)
def test_each_lossy_field_is_taken_out_and_others_are_kept(fields: dict[str, Any]) -> None:
    unet = {"placement": "offload"} | fields.get("components", {}).get("unet", {})
    choices = fields | {"components": {"unet": unet}, "device": "loopback"}
    plan = Plan.from_mapping(choices)
    assert plan.lossy
    changed = Plan.from_mapping(lossless_choices(choices, plan))
    assert changed.lossless
    assert (changed.device, changed.level, changed.components["unet"].placement) == ("loopback", plan.level, "offload")
    assert Plan.from_mapping(choices) == plan  # not changed itself


def test_what_a_complete_plan_derived_from_eight_bits_is_resolved_anew() -> None:
    unet = {
        "placement": "stream",
        "storage": "int8",
        "granularity": "layer",
        "ring_buffer": 9,
        "resident_layers": ["a"],
    }
    choices = {"components": {"unet": unet}, "forecast": [{"name": "denoise", "seconds": 1.0, "peak_bytes": 1}]}
    changed = Plan.from_mapping(lossless_choices(choices, Plan.from_mapping(choices)))
    assert changed.components["unet"].ring_buffer is None
    assert changed.forecast == ()


def test_only_pictures_are_compared() -> None:
    with pytest.raises(InputError, match="returns int"):
        comparison._frames([1])
    assert math.isclose(float(comparison._tensor(Image.new("I;16", (2, 2), 65535)).max()), 1.0)
    assert comparison._tensor(Image.new("P", (3, 2))).shape == (1, 3, 2, 3)
