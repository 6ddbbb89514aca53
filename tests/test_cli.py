"""The command line: what it writes and says when all is well, and its one line when the input is wrong."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import tightfit
from tightfit import Plan, cli
from tightfit.checkpoint.folder import check_folder
from tightfit.run import job

UNET = "unet/diffusion_pytorch_model.safetensors"
SMALL = ("--height", "64", "--width", "64", "--steps", "2", "--seed", "1", "--device", "cpu")
PICTURE = ("--out", "fox.png")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model that may be broken."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def tightfit_(*words: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(cli.app, [str(word) for word in words])


def run(*words: object, **environment: str) -> Result:
    """`tightfit run`, which must go well."""
    result = tightfit_("run", *words, **environment)
    assert result.exit_code == 0, result.output
    return result


def last_line(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def pixels(path: str) -> bytes:
    with Image.open(path) as picture:
        return picture.tobytes()


# all is well


def test_a_budget_is_kept_to(tiny_model: Path) -> None:
    words = ("--height", 64, "--width", 64, "--steps", 2, "--seed", 1)
    plain = run(tiny_model, "a fox", *words, "--out", "plain.png")
    within = run(
        tiny_model, "a fox", *words, "--budget", "150MB", "--device", "loopback", "--out", "within.png", "--json"
    )
    printed = last_line(within)
    assert printed["lossless"] is True
    assert printed["plan"]["budget"] == {"device": 150_000_000, "devices": {}, "ram": None}
    assert 0 < printed["measured"]["peak_bytes"] <= printed["predicted"]["peak_bytes"] <= 150_000_000
    assert all(phase["predicted_peak_bytes"] for phase in printed["phases"] if phase["name"] != "load")
    assert Image.open("plain.png").tobytes() == Image.open("within.png").tobytes()
    assert plain.exit_code == 0


def test_a_run_writes_a_picture_that_says_how_it_was_made(tiny_model: Path) -> None:
    result = run(tiny_model, "a red fox", *SMALL, *PICTURE, "--timeline", "memory.svg", "--json")
    assert files() == ["fox.png", "memory.svg"]
    assert result.stderr == ""
    assert "wrote fox.png\nwrote memory.svg\n" in result.stdout
    with Image.open("fox.png") as picture:
        assert picture.size == (64, 64)
        said = picture.text
    assert (said["prompt"], said["seed"], said["model"], said["Software"]) == ("a red fox", "1", "tiny", "tightfit")
    assert Plan.from_text(said["plan"]) == Plan.from_mapping(last_line(result)["plan"])


def test_the_last_line_of_json_has_all_that_was_measured(tiny_model: Path) -> None:
    printed = last_line(run(tiny_model, "a red fox", *SMALL, *PICTURE, "--json"))
    assert set(printed) >= {"plan", "lossless", "predicted", "measured", "phases", "outputs", "seed"}
    assert printed["outputs"] == ["fox.png"]
    assert printed["seed"] == 1
    assert printed["lossless"] is True
    assert printed["predicted"] == {"peak_bytes": None, "seconds": None}
    assert set(printed["measured"]) == {"peak_bytes", "seconds", "rss_peak_bytes"}
    assert all(value > 0 for value in printed["measured"].values())
    assert [phase["name"] for phase in printed["phases"]] == ["load", "encode", "denoise", "decode"]
    for phase in printed["phases"]:
        assert set(phase) >= {"name", "predicted_peak_bytes", "measured_peak_bytes", "seconds"}
    assert printed["plan"]["request"] == {
        "height": 64, "width": 64, "frames": None, "batch": 1, "steps": 2, "guidance": None,
        "backward": None,
        "arguments": {},
    }  # fmt: skip


def test_the_same_seed_gives_the_same_pictures_at_every_level(tiny_model: Path) -> None:
    run(tiny_model, "a red fox", *SMALL, "--out", "first.png")
    run(tiny_model, "a red fox", *SMALL, "--out", "again.png")
    run(tiny_model, "a red fox", *SMALL, "--out", "other.png", "--seed", "2")
    result = run(
        tiny_model, "a red fox", *SMALL, "--out", "streamed.png", "--device", "loopback", "--level", 3, "--json"
    )
    assert pixels("again.png") == pixels("first.png")
    assert pixels("other.png") != pixels("first.png")
    assert pixels("streamed.png") == pixels("first.png")
    assert last_line(result)["lossless"] is True
    assert last_line(result)["plan"]["components"]["unet"]["placement"] == "stream"


def test_without_a_seed_each_run_has_its_own_and_says_which(tiny_model: Path) -> None:
    printed = [last_line(run(tiny_model, "a fox", *SMALL[:6], "--device", "cpu", "--json")) for _ in range(2)]
    assert printed[0]["seed"] != printed[1]["seed"]
    assert files() == ["a-fox-2.png", "a-fox.png"]


def test_a_batch_writes_one_file_each(tiny_model: Path) -> None:
    printed = last_line(run(tiny_model, "a red fox", *SMALL, *PICTURE, "--batch", 2, "--json"))
    assert printed["outputs"] == files() == ["fox-0.png", "fox-1.png"]
    assert pixels("fox-0.png") != pixels("fox-1.png")


def test_set_goes_over_level_goes_over_the_plan_file(tiny_model: Path) -> None:
    Path("plan.yaml").write_text(
        "level: 3\nvae: {tile: 128, overlap: 0.5}\ndevice: loopback\nrequest: {steps: 1, batch: 2}"
    )
    words = ("--plan", "plan.yaml", "--level", 1, "--set", "vae.tile=64", "--set", "request.height=64", "--json")
    plan = Plan.from_mapping(last_line(run(tiny_model, "a fox", "--width", 64, *words, "--steps", 2))["plan"])
    assert plan.level == 1
    assert (plan.vae.tile, plan.vae.overlap, plan.vae.slicing) == (64, 0.5, True)
    assert plan.device == "loopback"
    assert plan.request == tightfit.Request(height=64, width=64, steps=2, batch=2)
    assert files() == ["a-fox-0.png", "a-fox-1.png", "plan.yaml"]


def test_the_device_of_the_command_line_goes_over_the_plan_file(tiny_model: Path) -> None:
    Path("plan.json").write_text('{"level": 2, "device": "loopback"}')
    printed = last_line(run(tiny_model, "a fox", *SMALL, "--plan", "plan.json", "--json"))
    assert printed["plan"]["device"] == "cpu"


def test_the_plan_in_a_picture_makes_the_same_picture_again(tiny_model: Path) -> None:
    first = run(tiny_model, "a red fox", *SMALL, *PICTURE, "--device", "loopback", "--level", 2, "--json")
    with Image.open("fox.png") as picture:
        Path("plan.json").write_text(picture.text["plan"])
    again = run(tiny_model, "a red fox", "--plan", "plan.json", "--seed", 1, "--out", "again.png", "--json")
    assert last_line(again)["plan"] == last_line(first)["plan"]
    assert pixels("again.png") == pixels("fox.png")
    other = tightfit_("run", tiny_model, "a red fox", "--plan", "plan.json", "--level", 3, "--out", "other.png")
    assert other.exit_code == 2
    assert "plan.json is a complete plan (level 2): --level 3 would change its name and nothing else" in other.stderr
    assert not Path("other.png").exists()


def test_who_watches_sees_plain_lines_where_there_is_no_terminal(tiny_model: Path) -> None:
    *steps, end = run(tiny_model, "a red fox", *SMALL, *PICTURE, "--watch").stderr.splitlines()
    size = r"[\d.]+ (B|.iB)"
    numbers = f": weights {size}, activations {size}, peak {size}, RAM {size}"
    assert len(steps) == 2
    for index, line in enumerate(steps, start=1):
        assert re.fullmatch(f"step {index} of 2, denoise{numbers}", line)
    assert re.fullmatch(f"decode{numbers}", end)


def test_who_watches_a_terminal_sees_them_below_the_bar(tiny_model: Path) -> None:
    shown = run(tiny_model, "a red fox", *SMALL, *PICTURE, "--watch", FORCE_COLOR="1", TERM="xterm").stderr
    assert "denoising" in shown
    assert "2/2" in shown
    assert "decode: weights" in shown


def test_verbose_logs_one_line_for_the_call_and_leaves_no_handler(tiny_model: Path) -> None:
    logged = run(tiny_model, "a red fox", *SMALL, *PICTURE, "--verbose").stderr
    assert re.fullmatch(r"[-\d]+ [:,\d]+ tightfit call=1 device=cpu level=0 seconds=.*\n", logged)
    assert run(tiny_model, "a red fox", *SMALL, *PICTURE).stderr == ""


def test_profile_prints_where_the_time_went(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "Self CPU" in run(tiny_model, "a red fox", *SMALL, *PICTURE, "--profile").stdout
    assert capfd.readouterr().err == ""


def test_notices_of_the_libraries_stay_off_the_terminal(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(tiny_model, "a red fox", *SMALL, *PICTURE, "--dtype", "float16")
    assert result.stderr == capfd.readouterr().err == ""


def test_the_demo_model_says_which_words_it_does_not_know(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "find_model", lambda name: check_folder(tiny_model) if name is None else None)
    warning = run("a red fox and a Fox by a green circle", *SMALL, *PICTURE).stderr
    assert warning.startswith("the demo model does not know: fox, by. It knows: a, an, and, at, background, ")
    assert "circle" in warning
    assert len(warning.splitlines()) == 1
    assert run("a green circle on the left", *SMALL, *PICTURE).stderr == ""
    with Image.open("fox.png") as picture:
        assert picture.text["model"] == "tightfit demo model"


# the input is wrong: words for a model and a picture, the type of the error, and what its line says

WRONG: dict[str, tuple[tuple[object, ...], str, str]] = {
    "four words": (("fox", "snow"), "InputError", r"not 4 words: put the prompt in quotes"),
    "height": (("--height", 66), "RequestError", r"height 66 is not a multiple of 4.*: 64 or 68 would do"),
    "size": (("--height", 10**9), "RequestError", r"the pictures alone would take .* ask for less"),
    "steps": (("--steps", -1), "RequestError", r"steps must be greater than 0, not -1"),
    "too many steps": (("--steps", 2000), "RequestError", r"2000 cannot be larger than"),
    "absurd steps": (("--steps", 10**9), "RequestError", r"1000000000 steps are too many: 10,000 at the most"),
    "batch": (("--batch", 0), "RequestError", r"batch must be greater than 0, not 0"),
    "batch of many digits": (("--batch", "9" * 400), "RequestError", r"batch must be less than 9223372036854775808"),
    "budget of many digits": (("--budget", "9" * 400), "PlanError", r"device must be less than 9223372036854775808"),
    "seed": (("--seed", -1), "RequestError", r"seed must be between 0 and .*, not -1"),
    "guidance": (("--guidance", "nan"), "RequestError", r"guidance must be a finite number"),
    "frames": (("--frames", 9), "RequestError", r"StableDiffusionPipeline takes no frames"),
    "level": (("--level", 7), "PlanError", r"level must be less than or equal to 3, not 7"),
    "field": (("--set", "vae.tiles=64"), "PlanError", r"unknown field of VaePlan 'tiles': did you mean 'tile'\?"),
    "no field": (("--set", "vae.tile"), "PlanError", r"--set 'vae.tile' is not FIELD=VALUE"),
    "empty field": (("--set", "vae..tile=64"), "PlanError", r"is not FIELD=VALUE"),
    "no value": (("--set", "vae.tile=[64"), "PlanError", r"--set 'vae.tile=\[64': the value is not YAML"),
    "no date": (("--set", "vae.tile=2026-13-45"), "PlanError", r"the value is not YAML"),
    "too deep": (("--level", 1, "--set", "level.x=1"), "PlanError", r"--set level.x: level has no fields inside"),
    "tile": (("--set", "vae.tile=8"), "PlanError", r"tile must be greater than or equal to 16, not 8"),
    "technique": (("--set", "components.unet.storage=fp9"), "PlanError", r"or 'int8', not 'fp9'"),
    "component": (("--set", "components.unit.placement=resident"), "PlanError", r"'unit': did you mean 'unet'\?"),
    "request": (("--set", "request.heigth=64"), "RequestError", r"unknown field of Request .* mean 'height'\?"),
    "no request": (("--set", "request=64"), "RequestError", r"a request is a mapping of fields to values, not 64"),
    "no plan": (("--plan", "missing.yaml"), "PlanError", r"cannot read the plan missing.yaml: No such file"),
    "plan folder": (("--plan", "."), "PlanError", r"cannot read the plan \.: it is a folder"),
    "plan": (("--plan", "text.yaml"), "PlanError", r"this is neither JSON nor YAML"),
    "plan field": (("--plan", "field.yaml"), "PlanError", r"unknown field of Plan 'levle': did you mean 'level'\?"),
    "plan list": (("--plan", "list.yaml"), "PlanError", r"a plan is a mapping of fields to values, not \[1, 2\]"),
    "empty plan": (("--plan", "empty.yaml"), "PlanError", r"a plan is a mapping of fields to values, not None"),
    "device": (("--device", "cpuu"), "InputError", r"unknown device 'cpuu': did you mean 'cpu'\?"),
    "plan's device": (("--set", "device=tpu", "--out", "b.png"), "InputError", r"unknown device 'tpu'"),
    "card": (("--device", "cuda:99"), "InputError", r"no such device: cuda:99; this computer has \d+ CUDA cards"),
    "dtype": (("--dtype", "float64"), "InputError", r"unknown dtype 'float64': did you mean 'float\d\d'\?"),
    "snapshot": (("--snapshot", "a.pickle"), "InputError", r"snapshot needs a CUDA device: cpu keeps no"),
    "timeline": (("--timeline", "x.jpg"), "InputError", r"--timeline x.jpg must end in .png or .svg"),
    "timeline folder": (("--timeline", "folder.png"), "InputError", r"cannot write folder.png: it is a folder"),
    "no folder": (("--out", "missing/a.png"), "InputError", r"cannot write missing/a.png: No such file or directory"),
    "no png": (("--out", "a.jpg"), "InputError", r"--out a.jpg must be a .png file or a folder that exists"),
    "file": (("--out", "text.yaml/a.png"), "InputError", r"cannot write text.yaml/a.png: Not a directory"),
    "batch folder": (("--out", "folder.png/../a.png", "--batch", 2), "InputError", r"a-0.png: it is a folder"),
    "long name": (("--out", "x" * 300 + ".png"), "InputError", r"cannot write x+…x+\.png: File name too long"),
}  # fmt: skip


def refused(result: Result, kind: str, message: str) -> None:
    """One line, exit code 2, nothing else."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    printed = last_line(result)
    assert set(printed) == {"error"}
    assert printed["error"]["type"] == kind
    assert line == f"tightfit: {printed['error']['message']}"
    assert re.search(message, line), line
    assert len(result.stdout.splitlines()) == 1


@pytest.fixture
def _things_in_the_way() -> None:
    Path("text.yaml").write_text("level: 1: 2\n  - {")
    Path("field.yaml").write_text("levle: 1")
    Path("list.yaml").write_text("[1, 2]")
    Path("empty.yaml").touch()
    Path("folder.png").mkdir()
    Path("a-0.png").mkdir()


@pytest.mark.usefixtures("_things_in_the_way")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_nothing_is_written(tiny_model: Path, name: str) -> None:
    words, kind, message = WRONG[name]
    before = files()
    device = () if name == "plan's device" else ("--device", "cpu")
    result = tightfit_("run", tiny_model, "a fox", *SMALL[:8], *device, *PICTURE, "--json", *words)
    refused(result, kind, message)
    assert files() == before


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        ("lorra", "unknown kind of backward pass 'lorra': did you mean 'lora'"),
        ("lora:0", "backward=lora:0 is none of inputs, parameters, lora, lora:1 … lora:4096"),
        ("lora:9999999999", "is none of"),
        ("inputs:3", "backward=inputs:3 is none of"),
    ],
)
def test_an_unknown_backward_pass_is_refused(tiny_model: Path, backward: str, message: str) -> None:
    result = tightfit_("plan", tiny_model, "--card", "rtx3060", "--backward", backward, "--json")
    refused(result, "RequestError", re.escape(message))


def test_backward_passes_are_planned(tiny_model: Path) -> None:
    """They need more, and of the parameters of a LoRA less than of all."""
    asked = ("plan", tiny_model, "--card", "rtx3060", *SMALL[:4], "--steps", 2, "--guidance", 1, "--level", 0, "--json")
    needed = {}
    for kind in ("", "lora", "inputs", "parameters"):
        result = tightfit_(*asked, *(("--backward", kind) if kind else ()))
        assert result.exit_code == 0, result.output
        phases = {phase["name"]: phase for phase in last_line(result)["phases"]}
        needed[kind] = phases["denoise"]["predicted_peak_bytes"]
        assert (f"backward pass for {kind}" in result.stdout.splitlines()[0]) == bool(kind)
    assert needed[""] < needed["lora"] < needed["parameters"]
    assert needed[""] < needed["inputs"]
    within = tightfit_(*asked[:-3], "--budget", "150MB", "--backward", "parameters", "--json")
    assert last_line(within)["plan"]["components"]["unet"]["gradient_checkpointing"] is not None


def test_an_empty_prompt_is_refused_with_and_without_a_model(tiny_model: Path) -> None:
    refused(tightfit_("run", tiny_model, "", "--json"), "RequestError", "the prompt is empty")
    refused(tightfit_("run", " ", "--json"), "RequestError", "the prompt is empty")


def test_without_json_stdout_stays_empty(tiny_model: Path) -> None:
    result = tightfit_("run", tiny_model, "a fox", "--level", 7)
    assert (result.exit_code, result.stdout) == (2, "")


# the model is wrong


def missing(model: Path) -> str:
    shutil.rmtree(model)
    return "model does not exist"


def no_index(model: Path) -> str:
    (model / "model_index.json").unlink()
    return "is no model: it has no model_index.json, but scheduler, text_encoder"


def truncated(model: Path) -> str:
    weights = (model / UNET).read_bytes()
    (model / UNET).write_bytes(weights[:-1000])
    return f"{Path(UNET).name} is truncated: its header promises {len(weights):,} bytes"


def missing_shard(model: Path) -> str:
    (model / UNET).rename(model / "unet" / "there.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "there.safetensors", "b": "not-there.safetensors"}}
    (model / f"{UNET}.index.json").write_text(json.dumps(index))
    return "names 2 shards, of which 1 are missing: not-there.safetensors"


def pickled(model: Path) -> str:
    (model / UNET).rename(model / "unet" / "diffusion_pytorch_model.bin")
    return "diffusion_pytorch_model.bin is a pickle, which can run code when it is read"


def lacking(model: Path) -> str:
    config = json.loads((model / "vae/config.json").read_text())
    (model / "vae/config.json").write_text(json.dumps(config | {"layers_per_block": 2}))
    return r"vae lacks 48 of 200 weights: decoder\..* and 45 more; its files are vae/diffusion_pytorch"


def without_words(model: Path) -> str:
    """The picture was another one, without a word."""
    (model / "tokenizer/tokenizer.json").unlink()
    return r"tokenizer has no words for CLIPTokenizer.*it needs tokenizer\.json or vocab\.json and"


def unknown_dtype(model: Path) -> str:
    (model / UNET).write_bytes((model / UNET).read_bytes().replace(b'"F32"', b'"F99"', 1))
    return r"has '.*' as 'F99': tensors are read as F64, F32"


SPOILT = [missing, no_index, truncated, missing_shard, pickled, lacking, without_words, unknown_dtype]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_model_that_cannot_be_used_is_one_line(model: Path, spoil: Callable[[Path], str]) -> None:
    """A plan is refused as a run is: both would be wrong in the same way."""
    message = spoil(model)
    refused(tightfit_("run", model, "a fox", *SMALL, *PICTURE, "--json"), "ModelError", message)
    refused(tightfit_("plan", model, "--card", "rtx3060", *SMALL[:6], "--json"), "ModelError", message)
    assert files() == []


def test_a_name_that_is_neither_here_nor_on_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    message = "no/model is neither a folder here nor to be had from the hub: Name or service not known$"
    refused(tightfit_("run", "no/model", "a fox", "--json"), "ModelError", message)
    refused(tightfit_("run", "./model", "a fox", "--json"), "ModelError", "model does not exist")


# the run fails


def test_a_failure_nobody_foresaw_is_one_line_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no space\nleft")

    monkeypatch.setattr(job, "save_pictures", fail)
    result = tightfit_("run", tiny_model, "a fox", *SMALL, *PICTURE, "--json")
    assert result.exit_code == 1
    assert result.stderr == "tightfit: RuntimeError: no space left\n"
    assert last_line(result) == {"error": {"type": "RuntimeError", "message": "RuntimeError: no space left"}}


def test_pictures_of_no_numbers_are_refused(tiny_model: Path) -> None:
    """They would be black, without a word."""
    result = tightfit_("run", tiny_model, "a fox", *SMALL, *PICTURE, "--guidance", "1e30", "--json")
    message = "pixels that are no numbers (NaN), for guidance 1e+30 and 64×64: a smaller guidance, or --dtype float32"
    assert (result.exit_code, last_line(result)["error"]["type"]) == (1, "RunError")
    assert message in result.stderr
    assert files() == []


@pytest.mark.parametrize("command", [("run",), ("plan", "--card", "rtx3060")])
def test_what_fails_in_a_call_names_the_component_and_its_configuration(model: Path, command: tuple[str, ...]) -> None:
    config = json.loads((model / "scheduler/scheduler_config.json").read_text())
    (model / "scheduler/scheduler_config.json").write_text(json.dumps(config | {"prediction_type": "x"}))
    words = ("a fox", *SMALL, *PICTURE) if command == ("run",) else SMALL[:6]
    result = tightfit_(command[0], model, *command[1:], *words, "--json")
    assert result.exit_code == 1
    said = (
        "StableDiffusionPipeline failed in scheduler (DDIMScheduler, as scheduler/scheduler_config.json describes it)"
    )
    assert result.stderr.startswith(f"tightfit: {said}: prediction_type given as x must be one of")
    assert last_line(result)["error"]["cause"] == "ValueError"
    assert files() == []


@pytest.mark.parametrize(("steps", "said"), [(2000, r"2000 cannot be larger than"), (10**9, r"10,000 at the most")])
def test_a_plan_of_too_many_steps_is_refused_as_a_run_is(tiny_model: Path, steps: int, said: str) -> None:
    result = tightfit_("plan", tiny_model, "--card", "rtx3060", *SMALL[:4], "--steps", steps, "--json")
    refused(result, "RequestError", said)


@pytest.mark.parametrize("wish", [("--budget", "1GB"), ("--level", 0)], ids=["budget", "level"])
@pytest.mark.parametrize(("steps", "said"), [((), 50), (("--steps", 3), 3)], ids=["default", "asked"])
def test_a_plan_begins_with_how_many_steps_it_is_for(
    tiny_model: Path, wish: tuple[str, Any], steps: tuple[str, int], said: int
) -> None:
    result = tightfit_("plan", tiny_model, "--card", "rtx3060", *SMALL[:4], *wish, *steps)
    assert result.exit_code == 0
    assert f", {said} steps, " in result.output.splitlines()[0]


# help and usage


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run",), "Missing argument"),
        (("run", "a fox", "--levle", "1"), "No such option: --levle"),
        (("run", "a fox", "--level", "abc", "--json"), "Invalid value for '--level'"),
        (("walk",), "No such command 'walk'"),
    ],
)
def test_usage_errors_end_with_two_and_no_traceback(words: tuple[str, ...], said: str) -> None:
    result = tightfit_(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_the_version_is_told() -> None:
    result = tightfit_("--version")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "tightfit 0.1.0\n", "")


@pytest.mark.parametrize(("words", "text"), [((), cli.EXAMPLES), (("run",), cli.RUN_EXAMPLES)])
def test_help_shows_examples_first_each_on_a_line_of_its_own(words: tuple[str, ...], text: str) -> None:
    shown = [line.strip() for line in tightfit_(*words, "--help", COLUMNS="80").stdout.splitlines()]
    examples = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert len(examples) >= 2
    places = [shown.index(example) for example in examples]
    assert places == list(range(places[0], places[0] + len(examples)))
    assert shown[1].startswith("Usage: ")
    assert places[-1] < next(index for index, line in enumerate(shown) if "─ Options ─" in line)


def test_the_command_line_itself_loads_no_torch() -> None:
    """So that help and mistakes do not wait for it. What `import tightfit` loads is the public face's affair."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('tightfit')\n"
        "package.__path__ = [sys.argv.pop(1)]\n"
        "sys.modules['tightfit'] = package\n"
        "from tightfit.cli import app\n"
        "app(standalone_mode=False)\n"
        "assert not {'torch', 'diffusers', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(Path(tightfit.__file__).parent), "run", "--help"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.stderr == ""
    assert "Examples:" in result.stdout


@pytest.mark.parametrize("columns", ["1", "1000"])
def test_a_terminal_may_be_of_any_width(tiny_model: Path, columns: str) -> None:
    terminal = {"COLUMNS": columns, "LINES": "1", "TERM": "xterm", "FORCE_COLOR": "1"}
    assert tightfit_("run", "--help", **terminal).exit_code == 0
    run(tiny_model, "a fox", *SMALL, *PICTURE, "--watch", **terminal)
    assert files() == ["fox.png"]
    refused = tightfit_("run", tiny_model, "a fox", "--level", 7, **terminal)
    assert refused.exit_code == 2
    assert "level must be less than or equal to 3, not 7" in refused.stderr


# the real thing


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "tightfit", "run", "--help"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "Usage: tightfit run [OPTIONS]" in result.stdout
    assert result.stdout == CliRunner().invoke(cli.app, ["run", "--help"], prog_name="tightfit").output


def started(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tightfit", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(stream: Iterator[str], start: str) -> None:
    assert any(line.startswith(start) for line in stream)


def test_ctrl_c_leaves_no_half_written_file(tiny_model: Path) -> None:
    Path("fox.png").write_bytes(b"an older picture")
    words = (*SMALL[:4], "--steps", 999, "--watch", *PICTURE, "--timeline", "memory.png", "--json")
    with started("run", tiny_model, "a fox", *words) as process:
        assert isinstance(process.stderr, io.TextIOBase)
        until(process.stderr, "step 3 of 999, denoise")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "tightfit: interrupted by SIGINT: no half-written file is left"
    assert "Traceback" not in err
    assert json.loads(out)["error"]["type"] == "SIGINT"
    assert files() == ["fox.png"]
    assert Path("fox.png").read_bytes() == b"an older picture"


def test_a_real_process_says_nothing_on_stderr(tiny_model: Path) -> None:
    with started("run", tiny_model, "a red fox", *SMALL) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "wrote a-red-fox.png" in out
    assert files() == ["a-red-fox.png"]


WITHOUT_THREADS = """
import threading
def refuse(self): raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
from tightfit.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--version",), 0, ""),
        (("run", "a fox", "--steps", "1", "--device", "cpu"), 1, "1 threads and may start no more: raise its limit"),
    ],
)
def test_a_process_that_may_start_no_thread(words: tuple[str, ...], code: int, said: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_THREADS, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(Path.cwd().iterdir())
