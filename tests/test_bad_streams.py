"""Streams and files that cannot be written or never end: what is said, and that the picture is there all the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from tightfit import cli, files, terminal
from tightfit.errors import InputError, PlanError, RequestError, RunError
from tightfit.measure.kept_rates import kept_file, read_kept
from tightfit.run import files as run_files
from tightfit.run.answer_cache import keep, lookup
from tightfit.run.calibration import CalibrationStore
from tightfit.run.call_arguments import Prompt
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Plan
from tightfit.schema.results import CallMeasurement

SMALL = ("--height", "64", "--width", "64", "--steps", "1", "--seed", "1", "--device", "cpu", "--out", "fox.png")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["pipe", "device", "link to a device"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "odd.png"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        os.mknod(path, 0o20666, os.stat("/dev/full").st_rdev) if os.geteuid() == 0 else path.symlink_to("/dev/full")
    else:
        path.symlink_to("/dev/null")
    kind = os.lstat(path).st_mode
    yield path
    assert os.lstat(path).st_mode == kind  # never replaced


def command(*words: object, **streams: Any) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "ignore", "-m", "tightfit", *map(str, words)]
    return subprocess.run(program, check=False, text=True, timeout=300, **streams)


def invoked(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


# what is no file


def test_only_files_are_replaced(no_file: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*odd.png: it is no file, but a pipe, a device"):
        run_files.check_writable(no_file)
    with pytest.raises(OSError, match="it is no file"), files.replacing(no_file) as partial:
        partial.write_text("whole")
    assert list(no_file.parent.glob(".tightfit-*")) == []


def test_nothing_waits_for_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo("plan.yaml")
    with pytest.raises(PlanError, match=r"cannot read the plan plan.yaml: it is no file, but a pipe"):
        Plan.fields_from_file("plan.yaml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep(Plan(level=1), {"a": 1})
    assert lookup(Plan, {"a": 1}) == Plan(level=1)
    (kept,) = (tmp_path / "tightfit/plans").iterdir()
    kept.unlink()
    os.mkfifo(kept)
    assert lookup(Plan, {"a": 1}) is None


def test_no_rates_and_no_measurements_are_read_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_file().parent.mkdir()
    os.mkfifo(kept_file())
    assert read_kept() == {}
    measured = CalibrationStore({"a": 1}, Accelerator(name="cpu", kind="cpu", bytes=1))
    measured.add(CallMeasurement(plan="x", phases=()))
    (kept,) = (tmp_path / "tightfit/experiences").iterdir()
    kept.unlink()
    os.mkfifo(kept)
    assert measured.read() == ()


def test_a_full_disk_names_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Image.Image):
        def save(self, *args: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"^cannot write fox.png: No space left on device$"):
        run_files.save_pictures([Full()], [Path("fox.png")], {})
    assert os.listdir() == []


# streams


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_under_stderr_loses_no_picture(tiny_model: Path) -> None:
    with open("/dev/full", "w") as full:
        done = command("run", tiny_model, "a fox", *SMALL, "--watch", "--verbose", stderr=full, stdout=subprocess.PIPE)
    assert (done.returncode, Path("fox.png").exists()) == (0, True)
    assert "wrote fox.png" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("run", "a fox"), id="run"),
        pytest.param(("plan", "--card", "rtx3060"), id="plan", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_has_gone_is_no_error(tiny_model: Path, words: tuple[str, ...]) -> None:
    """As of `| head -1`, but for certain: nobody reads from the start."""
    reading, writing = os.pipe()
    os.close(reading)
    options = SMALL if words[0] == "run" else SMALL[:6]
    done = command(words[0], tiny_model, *words[1:], *options, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("fox.png").exists() == (words[0] == "run")


def test_help_on_a_terminal_that_knows_ascii_only() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = command("run", "--help", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: tightfit run [OPTIONS]" in done.stdout
    assert done.stdout.isascii()


# names


def test_long_values_are_shortened() -> None:
    for words in (("--device", "y" * 5000), ("--out", f"{'y' * 5000}.png"), ("--budget", "9" * 5000)):
        result = invoked("run", "a fox", *words)
        assert result.exit_code == 2
        assert len(result.stderr) < 700
        assert "…" in result.stderr
    assert len(terminal._shortened("a " * 10_000)) == terminal.LONGEST


def test_a_user_that_does_not_exist() -> None:
    for words in (("run", "~nosuchuser", "a fox"), ("plan", "~nosuchuser"), ("plan", "x" * 5000)):
        result = invoked(*words)
        assert (result.exit_code, "is no folder: " in result.stderr) == (2, True)


def test_no_home_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    keep(Plan(level=1), {"a": 1})
    assert lookup(Plan, {"a": 1}) is None


HOMELESS = """
import pwd

def unknown(_):
    raise KeyError

pwd.getpwuid = unknown  # as for a user without an entry
from tightfit.__main__ import main
main()
"""


def test_a_process_without_home_runs_without_a_cache(tiny_model: Path) -> None:
    """Not only this package looks for a home, but the libraries too."""
    places = ("HOME", "XDG_CACHE_HOME", "HF_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    words = ("run", str(tiny_model), "a fox", *SMALL[:-4], "--device", "loopback", "--budget", "200MB")
    program = [sys.executable, "-W", "ignore", "-c", HOMELESS, *words, "--out", "fox.png"]
    done = subprocess.run(program, check=False, text=True, timeout=300, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in Path.cwd().iterdir()] == ["fox.png"]


def test_text_that_is_not_utf8(tiny_model: Path) -> None:
    odd = b"a \xff fox".decode(errors="surrogateescape")
    for prompt in ({"text": odd}, {"text": "a fox", "negative": odd}):
        with pytest.raises(RequestError, match=r"no text in UTF-8: 'a \\udcff fox'"):
            Prompt(seed=1, **prompt)
    name = Path(b"odd-\xff".decode(errors="surrogateescape"))
    name.symlink_to(tiny_model)
    assert invoked("run", name, "a fox", *SMALL).exit_code == 0
    with Image.open("fox.png") as picture:
        assert picture.text["model"] == "odd-\N{REPLACEMENT CHARACTER}"


def test_more_pictures_than_anybody_means() -> None:
    result = invoked("run", "a fox", "--batch", 100_000_000)
    assert result.exit_code == 2
    assert "a batch of 100,000,000 is too many: 10,000 at the most" in result.stderr


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("", "unknown device '': there are cpu, cuda, loopback, simulated"),
        ("cuda,", "unknown device ''"),
        ("cpu,cqu", "unknown device 'cqu': did you mean 'cpu'?"),
        ("loopback:1", "no such device: loopback:1; there is one loopback"),
        ("cpu:99", "no such device: cpu:99; there is one cpu"),
    ],
)
def test_devices_that_are_not_there(device: str, said: str) -> None:
    result = invoked("run", "a fox", "--device", device)
    assert (result.exit_code, said in result.stderr) == (2, True)
