"""Many requests in one command: what is checked first, what is drawn, what a rerun does, what is never replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from tightfit import BudgetTooSmall, InputError, Request, RequestError, cli
from tightfit.run import drawer
from tightfit.run.batch import in_order
from tightfit.run.batch_lines import BatchRequest, LineDefaults, name_requests, read_lines
from tightfit.run.batch_results import BatchFolder
from tightfit.run.prompt import Prompt

SMALL = ("--height", "64", "--width", "64", "--steps", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*lines: Any) -> Path:
    path = Path("prompts.jsonl")
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def batch(model: Path, *words: object) -> Result:
    asked = ["batch", model, "prompts.jsonl", "--out", "out", *SMALL, "--json", *words]
    return CliRunner().invoke(cli.app, [str(word) for word in asked])


def last_line(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def counts(result: Result) -> tuple[int, int, int]:
    printed = last_line(result)
    return printed["drawn"], printed["done_before"], printed["failed"]


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]


def pictures() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("out").glob("*.png")}


# lines

WRONG = {
    "no JSON": ("a fox", r"this is not JSON \(Expecting value, column 1\): write {\"prompt\".* alone in quotes"),
    "a list": ("[1]", r"a request is {\"prompt\".*not \[1\]"),
    "no prompt": ('{"seed": 1}', r"prompt is missing"),
    "empty": ('""', r"the prompt is empty"),
    "a typing error": ('{"prompt": "a", "heigth": 8}', r"'heigth': did you mean 'height'\?"),
    "height": ('{"prompt": "a", "height": -8}', r"height must be greater than 0, not -8"),
    "a word": ('{"prompt": "a", "steps": "many"}', r"steps must be a valid integer, not 'many'"),
    "steps": ('{"prompt": "a", "steps": 20000}', r"20000 steps are too many: 10,000 at the most"),
    "pictures": ('{"prompt": "a", "batch": 20000}', r"a batch of 20,000 is too many"),
    "seed": ('{"prompt": "a", "seed": -1}', r"seed must be greater than or equal to 0, not -1"),
    "name": ('{"prompt": "a", "name": "../a"}', r"name '../a' is no plain file name"),
    "backward": ('{"prompt": "a", "backward": "lora"}', r"backward=lora is for training"),
    "deep": ("[" * 100_000, r"this is not JSON"),
    "digits": ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", r"this is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named_with_its_field(name: str) -> None:
    line, message = WRONG[name]
    path = write('"a fox"', "", line, '"a cat"', line)
    with pytest.raises(InputError, match=rf"prompts.jsonl line 3: .*{message}.*; also wrong: line 5$"):
        read_lines(path, LineDefaults(Request()))


def test_bytes_that_are_no_text_and_files_without_requests_are_refused() -> None:
    Path("bytes").write_bytes(b'"a fox"\n"\xff"\n')
    with pytest.raises(RequestError, match=r"bytes line 2: byte 2 of the line is not UTF-8"):
        read_lines(Path("bytes"), LineDefaults(Request()))
    with pytest.raises(InputError, match="has no requests"):
        read_lines(write("", " "), LineDefaults(Request()))
    with pytest.raises(InputError, match=r"cannot read the requests missing: No such file"):
        read_lines(Path("missing"), LineDefaults(Request()))
    os.mkfifo("pipe")
    with pytest.raises(InputError, match=r"cannot read the requests pipe: it is no file, but a pipe"):
        read_lines(Path("pipe"), LineDefaults(Request()))


def test_lines_go_over_options_and_seeds_are_made_from_prompts() -> None:
    lines = ['"a fox"', {"prompt": "a fox", "steps": 3, "arguments": {"eta": 0.5}}, {"prompt": "a", "seed": 5}]
    path = write(*lines, {"prompt": "a", "steps": None, "negative_prompt": None})
    defaults = LineDefaults(Request(steps=9, height=64, arguments={"clip_skip": 1}), "snow")
    first, second, third, fourth = read_lines(path, defaults)
    assert first.request == Request(steps=9, height=64, arguments={"clip_skip": 1, "negative_prompt": "text"})
    assert (second.request.steps, second.request.height) == (3, 64)
    assert second.request.arguments == {"clip_skip": 1, "eta": 0.5, "negative_prompt": "text"}
    assert fourth.request == Request(height=64, arguments={"clip_skip": 1})
    assert (first.prompt.negative, fourth.prompt.negative) == ("snow", None)
    assert (third.prompt.seed, third.line) == (5, 3)
    assert first.prompt.seed != second.prompt.seed
    assert [each.prompt.seed for each in read_lines(path, defaults)][:2] == [first.prompt.seed, second.prompt.seed]
    assert read_lines(path, LineDefaults(Request(), seed=7))[0].prompt.seed == 7


def test_two_lines_never_write_the_same_file() -> None:
    def named(*lines: Any) -> tuple[BatchRequest, ...]:
        return name_requests(read_lines(write(*lines), LineDefaults(Request())), {"model": "m"})

    assert len({asked.name for asked in named('"a fox"', '"a fox"', '"A fox!"')}) == 3
    with pytest.raises(RequestError, match="line 2 asks for the same pictures as line 1: give it another seed"):
        named({"prompt": "a", "seed": 1}, {"prompt": "a", "seed": 1})
    with pytest.raises(RequestError, match=r"line 2 would write Fox-1\.png, too as line 1"):
        named({"prompt": "a", "name": "fox", "batch": 2}, {"prompt": "b", "name": "Fox-1.png"})


def test_a_digest_depends_on_all_that_pictures_do() -> None:
    def digest(line: dict[str, Any], mark: str = "m") -> str:
        return name_requests(read_lines(write({"prompt": "a"} | line), LineDefaults(Request())), {"m": mark})[0].digest

    changes: list[dict[str, Any]] = [
        {}, {"prompt": "b"}, {"seed": 1}, {"steps": 2}, {"negative_prompt": "b"}, {"arguments": {"eta": 1.0}},
    ]  # fmt: skip
    found = [digest(change) for change in changes] + [digest({}, "other model")]
    assert len(set(found)) == len(found)
    assert digest({"name": "x"}) == digest({})


def test_requests_alike_are_drawn_one_after_another_and_the_largest_first() -> None:
    def asked(line: int, side: int, text: str) -> BatchRequest:
        request = Request(height=side, width=side, arguments={"prompt_2": text})
        return BatchRequest(line, Prompt("a", 1), request)

    mixed = [asked(1, 64, "a"), asked(2, 128, "b"), asked(3, 64, "c"), asked(4, 128, "d")]
    assert [each.line for each in in_order(mixed)] == [2, 4, 1, 3]


# drawing


def test_what_is_done_is_not_drawn_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write('"a fox"', {"prompt": "a fox", "seed": 3, "name": "fox"}, {"prompt": "snow", "batch": 2, "name": "snow"})
    first = batch(tiny_model)
    assert first.exit_code == 0, first.output
    assert counts(first) == (3, 0, 0)
    assert last_line(first)["pictures"] == 4
    assert last_line(first)["pictures_per_minute"] > 0
    assert "4 pictures in" in first.stdout
    drawn = pictures()
    assert {"fox.png", "snow-0.png", "snow-1.png"} < set(drawn)
    assert len(drawn) == 4
    (record,) = [record for record in records() if record["name"] == "fox"]
    assert (record["seed"], record["device"], record["failure"]) == (3, "cpu", None)
    assert record["seconds"] > 0
    assert record["measured_peak_bytes"] > 0
    assert record["host"]
    with Image.open("out/fox.png") as picture:
        assert (picture.text["prompt"], picture.text["seed"]) == ("a fox", "3")  # type: ignore[attr-defined]
        assert picture.size == (64, 64)

    with monkeypatch.context() as patch:
        patch.setattr(drawer, "generate", lambda *_: pytest.fail("something is drawn again"))
        assert counts(batch(tiny_model)) == (0, 3, 0)
    Path("out/fox.png").unlink()
    assert counts(batch(tiny_model)) == (1, 2, 0)
    write('"a fox"', {"prompt": "a fox", "seed": 4, "name": "fox"})
    assert counts(batch(tiny_model)) == (1, 1, 0)  # another request under that name: its file is the batch's own
    assert pictures()["fox.png"] != drawn["fox.png"]
    assert {**pictures(), "fox.png": b""} == {**drawn, "fox.png": b""}


def test_a_batch_draws_what_a_run_draws(tiny_model: Path) -> None:
    write({"prompt": "a red fox", "seed": 3, "name": "fox", "negative_prompt": "snow"})
    assert batch(tiny_model).exit_code == 0
    run = ["run", str(tiny_model), "a red fox", *SMALL, "--seed", "3", "--out", "a.png", "--negative-prompt", "snow"]
    assert CliRunner().invoke(cli.app, run).exit_code == 0
    with Image.open("a.png") as one, Image.open("out/fox.png") as other:
        assert one.tobytes() == other.tobytes()


def test_one_that_fails_is_recorded_and_tried_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"prompt": "a fox", "name": "fox"}, {"prompt": "huge", "name": "huge", "height": 1024, "width": 1024})
    words = ("--device", "loopback", "--budget", "60MB")
    first = batch(tiny_model, *words)
    assert (first.exit_code, counts(first)) == (1, (1, 0, 1))
    (failure,) = last_line(first)["failures"]
    assert (failure["line"], failure["name"], failure["type"]) == (2, "huge", "BudgetTooSmall")
    assert "1024×1024 within 57.2 MiB" in failure["message"]
    assert "line 2, huge: StableDiffusionPipeline cannot do 1024×1024" in first.stdout
    failed, fox = records()  # the largest first
    assert (failed["failure"], failed["files"], failed["message"]) == ("BudgetTooSmall", [], failure["message"])
    assert 0 < fox["measured_peak_bytes"] <= fox["predicted_peak_bytes"] <= 60_000_000
    again = batch(tiny_model, *words)
    assert (again.exit_code, counts(again)) == (1, (0, 1, 1))
    assert len(records()) == 3


def test_requests_that_do_not_fit_are_planned_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def refuse(self: object, folder: object, request: Request) -> None:
        planned.append(request)
        raise BudgetTooSmall("it needs 3 bytes")

    monkeypatch.setattr("tightfit.run.run_target.RunTarget.load", refuse)
    write('"a"', '"b"', {"prompt": "c", "steps": 2})
    assert counts(batch(tiny_model)) == (0, 0, 3)
    assert len(planned) == 2


def test_an_error_of_one_call_does_not_end_the_batch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = drawer.generate

    def fail(pipe: Any, fitted: Any, prompt: Prompt, *rest: Any) -> Any:
        if prompt.text == "b":
            raise ZeroDivisionError("of b")
        return draw(pipe, fitted, prompt, *rest)

    monkeypatch.setattr(drawer, "generate", fail)
    write('"a"', '"b"', '"c"')
    result = batch(tiny_model)
    assert (result.exit_code, counts(result)) == (1, (2, 0, 1))
    assert last_line(result)["failures"][0]["message"] == "ZeroDivisionError: of b"


# wrong before anything is loaded


def check_refused(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert message in line
    assert "error" in last_line(result)


@pytest.fixture
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.run.run_target.RunTarget.load", lambda *_: pytest.fail("something is loaded"))


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_what_the_pipeline_does_not_take_is_refused_first(tiny_model: Path) -> None:
    write('"a"', {"prompt": "a", "height": 66}, {"prompt": "a", "frames": 9})
    check_refused(batch(tiny_model), "line 2: height 66 is not a multiple of 4, as this model needs: 64 or 68 would do")
    write('"a"', {"prompt": "a", "arguments": {"colour": 1}})
    check_refused(batch(tiny_model), "line 2: StableDiffusionPipeline takes no colour")
    assert not Path("out").exists()


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dtype", "float64"), "unknown dtype 'float64'"),
        (("--level", 9), "level must be less than or equal to 3, not 9"),
        (("--budget", "8GB", "--level", 2), "--budget makes the plan"),
        (("--out", "file/out"), "cannot make the folder file/out: Not a directory"),
    ],
)
def test_wrong_options_are_refused_first(tiny_model: Path, words: tuple[object, ...], message: str) -> None:
    write('"a"')
    Path("file").touch()
    check_refused(batch(tiny_model, *words), message)


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_a_file_that_the_batch_did_not_write_is_not_replaced(tiny_model: Path) -> None:
    write({"prompt": "a", "name": "fox"})
    Path("out").mkdir()
    Image.new("RGB", (8, 8)).save("out/fox.png")
    before = pictures()
    check_refused(batch(tiny_model), "line 1 would write fox.png, but out/fox.png is there, and this batch did not")
    assert pictures() == before
    Path("out/fox.png").unlink()
    Path("out/fox.png").mkdir()
    check_refused(batch(tiny_model), "out/fox.png is in the way: it is a folder")


def test_a_picture_that_was_changed_is_not_replaced(tiny_model: Path) -> None:
    write({"prompt": "a", "name": "fox"})
    assert batch(tiny_model).exit_code == 0
    Image.new("RGB", (8, 8)).save("out/fox.png")
    check_refused(batch(tiny_model), "or it was changed since: move it away")


def test_results_that_are_not_records_are_refused(tiny_model: Path) -> None:
    write('"a"')
    Path("out").mkdir()
    Path("out/results.jsonl").write_text('{"accuracy": 1}\n')
    check_refused(batch(tiny_model), "out/results.jsonl line 1 is no record of a batch")
    assert Path("out/results.jsonl").read_text() == '{"accuracy": 1}\n'


def test_two_batches_do_not_write_to_the_same_folder(tiny_model: Path) -> None:
    write('"a"')
    with BatchFolder(Path("out")).opened():
        check_refused(batch(tiny_model), "another batch writes to out")


# interrupted


def test_a_record_that_was_cut_off_counts_as_none(tiny_model: Path) -> None:
    write({"prompt": "a", "name": "a"}, {"prompt": "b", "name": "b"})
    assert batch(tiny_model).exit_code == 0
    whole = Path("out/results.jsonl").read_bytes()
    Path("out/results.jsonl").write_bytes(whole[:-20])
    assert counts(batch(tiny_model)) == (1, 1, 0)  # its picture is there, and has the digest of this request
    assert [record["name"] for record in records()] == ["a", "b"]
    assert Path("out/results.jsonl").read_bytes().startswith(whole[: whole.index(b"\n") + 1])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_batch_that_is_ended_leaves_what_is_done(tiny_model: Path, number: signal.Signals) -> None:
    write(*({"prompt": "a fox", "seed": seed, "name": f"fox-{seed}"} for seed in range(3)))
    command = [sys.executable, "-m", "tightfit", "batch", str(tiny_model), "prompts.jsonl", "--out", "out", *SMALL]
    with subprocess.Popen([*command, "--steps", "40"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: Path("out/results.jsonl").exists() and len(records()) == 1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert err.decode().splitlines()[-1] == "tightfit: interrupted by SIGINT: no half-written file is left"
    done = pictures()
    assert 1 <= len(done) <= 2
    assert sorted(os.listdir("out")) == sorted([*done, "results.jsonl"])
    again = batch(tiny_model, "--steps", "40")
    assert again.exit_code == 0, again.output
    assert counts(again)[1] >= 1
    assert set(pictures()) == {f"fox-{seed}.png" for seed in range(3)}
    assert all(pictures()[name] == content for name, content in done.items())


def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("nothing happens")
