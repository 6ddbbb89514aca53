"""`tightfit shard` of folders: the same model in shards, whole or not there, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from anonymous_memory import anonymous_bytes, highest_anonymous
from shard_checks import assert_same, complaint, content, names, shard, weights
from tightfit import ModelError, RunError, cli
from tightfit.checkpoint import folder_writer
from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.loading import load_pipeline
from tightfit.files import locking
from tightfit.run.shard import shard_model, verify_model
from tiny_pipelines import CASES

UNET = "unet/diffusion_pytorch_model"
CASE = {case.name: case for case in CASES}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# what is written


@pytest.mark.parametrize("name", ["StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "Flux", "Wan", "LTX"])
def test_a_pipeline_is_the_same_in_shards(name: str, tmp_path: Path, out: Path) -> None:
    pipe = CASE[name].make()
    pipe.save_pretrained(tmp_path / "src")
    assert shard(tmp_path / "src", out, "--max-shard-size", "20kB").exit_code == 0
    assert_same(weights(type(pipe).from_pretrained(out)), weights(type(pipe).from_pretrained(tmp_path / "src")))
    assert_same(weights(load_pipeline(check_folder(out))), weights(pipe))
    kept = {file for file in names(tmp_path / "src") if not file.endswith(".safetensors")}
    for file in kept:
        assert (out / file).read_bytes() == (tmp_path / "src" / file).read_bytes()
    assert len(names(out)) > len(kept) + 10
    largest = max(load_file(file)[key].nbytes for file in out.rglob("*.safetensors") for key in load_file(file))
    for file in out.rglob("*.safetensors"):
        held = load_file(file)
        assert sum(value.nbytes for value in held.values()) <= 20_000 or len(held) == 1, (file, largest)


def test_files_have_the_names_that_the_libraries_give_them(tmp_path: Path, out: Path) -> None:
    pipe = CASE["StableDiffusion"].make()
    for options in ({}, {"variant": "fp16"}):
        for size in ("10MB", "1KB"):  # one file, or a shard for almost each tensor
            made = tmp_path / f"{size}{len(options)}"
            pipe.save_pretrained(made / "theirs", max_shard_size=size, **options)
            pipe.save_pretrained(made / "source", **options)
            assert shard(made / "source", made / "ours", "--max-shard-size", size).exit_code == 0
            expected = {re.sub(r"\d{5}", "N", file) for file in names(made / "theirs")}
            assert {re.sub(r"\d{5}", "N", file) for file in names(made / "ours")} == expected | {"checksums.json"}
            assert_same(weights(type(pipe).from_pretrained(made / "ours", **options)), weights(pipe))
            if size == "1KB":
                (theirs,), (ours,) = ((made / which / "unet").glob("*index*") for which in ("theirs", "ours"))
                assert json.loads(ours.read_text()).keys() == json.loads(theirs.read_text()).keys()
                total = json.loads(theirs.read_text())["metadata"]["total_size"]
                assert json.loads(ours.read_text())["metadata"]["total_size"] == total


def test_one_component_is_a_folder_of_its_own(tiny_model: Path, out: Path) -> None:
    assert shard(tiny_model, out, "--component", "unet", "--max-shard-size", "100kB").exit_code == 0
    assert "config.json" in names(out)
    assert len(names(out)) > 5
    network = diffusers.UNet2DConditionModel.from_pretrained(out)
    assert_same(network.state_dict(), diffusers.UNet2DConditionModel.from_pretrained(tiny_model / "unet").state_dict())


def test_the_folder_of_one_network(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model / "vae", tmp_path / "vae")
    assert shard(source, out, "--max-shard-size", "100kB").exit_code == 0
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    network = diffusers.AutoencoderKL.from_pretrained(out)
    assert_same(network.state_dict(), diffusers.AutoencoderKL.from_pretrained(source).state_dict())
    assert "leave --component vae out" in complaint(source, tmp_path / "other", "--component", "vae")


def test_everything_but_other_weights_and_hidden_files_is_kept(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model, tmp_path / "src")
    there = ["README.md", "assets/picture.png", "unet/notes.txt", "tokenizer/special.model"]
    left = [".gitattributes", ".git/config", "whole.safetensors", "unet/diffusion_pytorch_model.bin", "vae/x.onnx",
            "unet/diffusion_pytorch_model.bin.index.json", "unet/diffusion_pytorch_model.fp16.safetensors"]  # fmt: skip
    for name in [*there, *left]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(name.encode())
    save_file({"x": torch.zeros(1)}, source / "unet/diffusion_pytorch_model.fp16.safetensors")
    save_file({"x": torch.zeros(1)}, source / "whole.safetensors")
    (source / "link.txt").symlink_to(source / "README.md")
    (source / "again").symlink_to(source)  # a loop
    assert shard(source, out).exit_code == 0
    assert names(out) == names(tiny_model) | set(there) | {"link.txt", "checksums.json"}
    assert (out / "link.txt").read_text() == "README.md"
    assert not (out / "link.txt").is_symlink()


DTYPES = ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["StableDiffusion3", "Wan"])  # T5 and Wan keep some weights in float32
def test_rounded_weights_are_those_that_loading_in_that_dtype_gives(
    name: str, dtype: str, tmp_path: Path, out: Path
) -> None:
    pipe = CASE[name].make()
    pipe.save_pretrained(tmp_path / "src", variant="fp16")
    assert shard(tmp_path / "src", out, "--dtype", dtype).exit_code == 0
    asked = {"dtype": getattr(torch, dtype)}
    expected = weights(type(pipe).from_pretrained(tmp_path / "src", variant="fp16", **asked))
    assert_same(weights(type(pipe).from_pretrained(out, **asked)), expected)
    stored = {key: value for file in out.rglob("*.safetensors") for key, value in load_file(file).items()}
    rounded = sum(value.dtype == getattr(torch, dtype) for value in stored.values())
    assert rounded > len(stored) / 2
    kept = [value for value in stored.values() if value.dtype == torch.float32]
    assert bool(kept) == (name == "Wan" or dtype == "float16")
    for config in out.glob("text_encoder*/config.json"):
        assert json.loads(config.read_text())["dtype"] == dtype


def test_dtypes_of_other_kinds_and_tensors_without_elements_stay(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model / "unet", tmp_path / "unet")
    tensors = {
        "a": torch.arange(3, dtype=torch.int8), "b": torch.tensor(2.5), "c": torch.zeros(0, 4),
        "d": torch.ones(5).half(), "e": torch.arange(2), "f": torch.tensor([True]),
        "g": torch.ones(2, dtype=torch.float8_e4m3fn),
    }  # fmt: skip
    save_file(tensors, source / "diffusion_pytorch_model.safetensors")
    assert shard(source, out).exit_code == 0
    assert_same(load_file(out / "diffusion_pytorch_model.safetensors"), tensors)


def test_a_terminal_shows_what_is_written_and_the_time_left(tiny_model: Path, out: Path) -> None:
    terminal = CliRunner(env={"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"})
    result = terminal.invoke(cli.app, ["shard", str(tiny_model), str(out)])
    assert result.exit_code == 0
    assert re.search(r"writing \S+", result.stderr)
    assert re.search(r"\d:\d\d:\d\d", result.stderr)
    assert shard(tiny_model, out.with_name("quiet")).stderr == ""


@pytest.mark.parametrize("name", [".", "new/folder", "link"])
def test_other_names_of_the_target(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here" if name == "." else tmp_path)
    result = shard(tiny_model, name)
    assert result.exit_code == 0, result.output
    assert shard(tmp_path / (name if name != "." else "here"), "--verify").exit_code == 0
    assert not list(tmp_path.rglob("*.part"))


# interruptions


class _StoppedError(Exception):
    pass


def stopping_after(count: int) -> Callable[[str, int, int], None]:
    """A listener that raises at the call of this number."""
    calls = iter(range(count))

    def on_progress(what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        if next(calls, None) is None:
            raise _StoppedError(what)

    return on_progress


@pytest.fixture
def whole(tiny_model: Path, tmp_path: Path) -> dict[str, bytes]:
    """What is written where nothing happens."""
    shard_model(tiny_model, tmp_path / "whole", "50kB")
    return content(tmp_path / "whole")


def test_what_was_finished_is_kept_after_an_interruption(tiny_model: Path, out: Path, whole: dict[str, bytes]) -> None:
    kept = []
    for count in (0, 1, 100, 200):
        with pytest.raises(_StoppedError):
            shard_model(tiny_model, out, "50kB", on_progress=stopping_after(count))
        assert not out.exists()
        kept.append(len(list(out.with_name("out.part").rglob("*.safetensors"))))
    written = shard_model(tiny_model, out, "50kB")
    assert content(out) == whole
    assert written.kept >= kept[-1] > kept[2] > 0
    assert not out.with_name("out.part").exists()
    again = shard_model(tiny_model, out, "50kB")  # it is there: nothing is done
    assert again.kept == again.files == len(whole) - 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it is forked, and has threads
def test_killed_at_any_moment(tiny_model: Path, out: Path, whole: dict[str, bytes]) -> None:
    """20 processes, each killed at a random moment; the seed is fixed, the moments still differ with the machine."""
    moments, killed = random.Random(7), 0
    for _ in range(20):
        child = os.fork()
        if child == 0:
            threading.Timer(moments.uniform(0, 0.2), os.kill, (os.getpid(), signal.SIGKILL)).start()
            shard_model(tiny_model, out, "50kB")
            os._exit(0)
        moments.random()
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if out.exists():
            assert content(out) == whole
            shutil.rmtree(out)
    assert killed > 3
    shard_model(tiny_model, out, "50kB")
    assert content(out) == whole


@pytest.mark.parametrize("how", ["other byte", "shorter", "longer", "gone", "record damaged", "record gone"])
def test_finished_files_that_were_damaged_are_written_again(
    how: str, tiny_model: Path, out: Path, whole: dict[str, bytes]
) -> None:
    with pytest.raises(_StoppedError):
        shard_model(tiny_model, out, "50kB", on_progress=stopping_after(100))
    work = out.with_name("out.part")
    file = next(work.rglob("*.safetensors"))
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how.startswith("record"):
        file = work / "checksums.json"
        file.write_text("{") if how == "record damaged" else file.unlink()
    else:
        file.write_bytes({"other byte": data[:-1] + bytes([data[-1] ^ 1]), "shorter": data[:-1]}.get(how, data + b"1"))
    if how == "record gone":
        assert "is no unfinished copy: remove it" in complaint(tiny_model, out, "--max-shard-size", "50kB")
        return
    shard_model(tiny_model, out, "50kB")
    assert content(out) == whole


def test_other_options_begin_anew(tiny_model: Path, out: Path, whole: dict[str, bytes]) -> None:
    with pytest.raises(_StoppedError):
        shard_model(tiny_model, out, "70kB", on_progress=stopping_after(100))
    assert shard_model(tiny_model, out, "50kB").kept == 0
    assert content(out) == whole


def test_a_source_that_changes_meanwhile(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model, tmp_path / "src")

    def on_progress(what: str, done: int, total: int) -> None:
        (source / f"{UNET}.safetensors").touch()

    with pytest.raises(ModelError, match="was changed while it was in use"):
        shard_model(source, out, "50kB", on_progress=on_progress)
    assert not out.exists()


def test_one_process_at_a_time(tiny_model: Path, out: Path) -> None:
    out.with_name("out.part").mkdir()
    with locking(out.with_name("out.part")):
        assert "another process is writing" in complaint(tiny_model, out, code=1)
    assert shard(tiny_model, out).exit_code == 0


# the disk


def test_a_disk_without_enough_space_is_found_out_beforehand(
    tiny_model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(out.parent)
    monkeypatch.setattr(folder_writer.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    said = complaint(tiny_model, out, code=1)
    assert re.search(r"out needs 1.\d+ MiB more, 0 B of 1.\d+ MiB are finished, and its disk has 977 KiB free", said)
    assert not list(out.parent.rglob("*.safetensors"))
    monkeypatch.undo()
    assert shard(tiny_model, out).exit_code == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fills_up(
    number: int, tiny_model: Path, out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, iter(range(60))

    def failing(handle: int, data: Any) -> int:
        if next(calls, None) is None:
            raise OSError(number, os.strerror(number))
        return write(handle, data)

    monkeypatch.setattr(folder_writer.os, "write", failing)
    said = complaint(tiny_model, out, "--max-shard-size", "50kB", code=1)
    monkeypatch.undo()
    if number == errno.EIO:
        assert "cannot be written: Input/output error" in said
    else:
        assert re.search(r"is full: .* MiB more are needed, .* free, .* of 1.\d+ MiB are finished; with", said)
    assert not list(out.parent.rglob("*.part/**/*.part"))
    written = shard_model(tiny_model, out, "50kB")
    assert written.kept > 0
    assert content(out) == whole


def test_memory_does_not_grow_with_the_model(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model / "unet", tmp_path / "unet")
    tensors: Any = {
        f"x{number}": torch.full((2**25,), number, dtype=torch.float16) for number in range(6)
    }  # 64 MiB each
    save_file(tensors, source / "diffusion_pytorch_model.safetensors")
    del tensors
    shard_model(tiny_model, tmp_path / "warm")
    before = anonymous_bytes(os.getpid())
    with highest_anonymous() as seen:
        shard_model(source, out)
    assert seen.most - before < 2**26
    assert seen.looks > 5


# checksums


def test_verify(tiny_model: Path, out: Path) -> None:
    shard_model(tiny_model, out, "300kB")
    result = shard(out, "--verify", "--json")
    assert result.exit_code == 0, result.output
    assert re.search(r"out is whole: \d+ files, 1.\d+ MiB, as its checksums say", result.stdout)
    assert json.loads(result.stdout.splitlines()[-1])["files"] == len(names(out)) - 1
    assert shard(tiny_model, out, "--verify").exit_code == 0
    recorded = json.loads((out / "checksums.json").read_text())["files"]
    assert recorded.keys() == names(out) - {"checksums.json"}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (flip, r"is damaged: its SHA-256 is [0-9a-f]{16}…, not [0-9a-f]{16}…"),
    "cut": (lambda file: os.truncate(file, 9), r"is damaged: it has 9 bytes, not [\d,]+"),
    "gone": (Path.unlink, r"cannot be read: No such file or directory"),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["unet/diffusion_pytorch_model-00002-of-00004.safetensors", "vae/config.json"])
def test_verify_says_which_file_is_damaged(name: str, how: str, tiny_model: Path, out: Path) -> None:
    shard_model(tiny_model, out, "300kB")
    damage, said = DAMAGE[how]
    damage(out / name)
    found = complaint(out, "--verify")
    assert re.search(rf"{name} {said} \(1 of \d+ files", found)


def test_an_unfinished_folder_is_not_verified_as_whole(tiny_model: Path, out: Path) -> None:
    with pytest.raises(_StoppedError):
        shard_model(tiny_model, out, "50kB", on_progress=stopping_after(100))
    finished = len(names(out.with_name("out.part"))) - 1
    assert finished > 0
    found = complaint(out.with_name("out.part"), "--verify")
    assert found.endswith(
        f"/out.part is not whole: {finished} of its files are finished; the same tightfit shard command goes on from "
        "there\n"
    )


def test_verify_names_several(tiny_model: Path, out: Path) -> None:
    shard_model(tiny_model, out, "300kB")
    flip(out / "model_index.json")
    (out / "vae/config.json").unlink()
    found = complaint(out, "--verify")
    assert re.search(r"\(2 of \d+ files are damaged: model_index.json, vae/config.json\)", found)


UNSOUND = ["", "[]", '{"files": 1}', '{"job": "", "files": {"../x": {"bytes": 1}}}', None]


@pytest.mark.parametrize(
    "record", [*UNSOUND, json.dumps({"job": "", "files": {"/x": {"bytes": 1, "sha256": "0" * 64}}})]
)
def test_verify_without_a_sound_record(record: str | None, tiny_model: Path, out: Path) -> None:
    shard_model(tiny_model, out)
    (out / "checksums.json").unlink()
    if record is not None:
        (out / "checksums.json").write_text(record)
    found = complaint(out, "--verify")
    assert "checksums.json" in found
    assert "out" in found
    with pytest.raises(ModelError):
        verify_model(out)


# what is refused


def test_an_existing_folder_is_never_changed(tiny_model: Path, out: Path) -> None:
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    assert "out is there already, a folder with 1 files and folders, and is never changed" in complaint(tiny_model, out)
    assert content(out) == {"mine.txt": b"precious"}
    (out / "mine.txt").unlink()
    assert shard(tiny_model, out, "--max-shard-size", "200kB").exit_code == 0  # it was empty
    before = content(out)
    assert "is there already" in complaint(tiny_model, out, "--max-shard-size", "300kB")
    assert content(out) == before
    assert not out.with_name("out.part").exists()
    out.with_name("file").write_text("mine")
    assert "is there already, a file" in complaint(tiny_model, out.with_name("file"))


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "size": (("--max-shard-size", "2 things"), r"'2 things' is not a size: write it like 8GB"),
    "no size": (("--max-shard-size", "0"), r"a size must be at least one byte"),
    "dtype": (("--dtype", "bfloat17"), r"unknown dtype 'bfloat17': did you mean 'bfloat16'\?"),
    "component": (("--component", "unnet"), r"unknown component 'unnet': did you mean 'unet'\?"),
    "scheduler": (("--component", "scheduler"), r"and has no weights: those that have are text_encoder, unet, vae"),
    "config": (("--config", "here"), r"--config here is for a single file, and .* is a folder"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_options(what: str, tiny_model: Path, out: Path) -> None:
    words, said = REFUSED[what]
    assert re.search(said, complaint(tiny_model, out, *words))
    assert not list(out.parent.iterdir())


def test_the_source_is_no_target(tiny_model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_model, tmp_path / "src")
    before = content(source)
    (tmp_path / "link").symlink_to(source)
    assert "is the source itself" in complaint(source, source)
    assert "is the source itself" in complaint(source, tmp_path / "link")
    assert "is within the source" in complaint(source, source / "unet" / "shards")
    assert "is there already" in complaint(source, tmp_path / "link" / "..")
    assert content(source) == before


def test_wrong_numbers_of_paths(tiny_model: Path, out: Path) -> None:
    assert "shard takes SRC and DST, or DST --verify, not 1 paths" in complaint(tiny_model)
    assert "not 3 paths" in complaint(tiny_model, out, out, "--verify")
    assert "does not exist: there is nothing to verify" in complaint(out, "--verify")
    assert "does not exist: a diffusers folder or a safetensors file is needed" in complaint(out, tiny_model)


def test_broken_sources(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model, tmp_path / "src")
    file = source / f"{UNET}.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-7])
    assert re.search(r"is truncated: its header promises [\d,]+ bytes, the file has", complaint(source, out))
    file.unlink()
    assert "has no weights for UNet2DConditionModel" in complaint(source, out)
    file.with_suffix(".bin").write_bytes(b"cos\nsystem")
    assert "is a pickle, which can run code when it is read" in complaint(source, out)
    assert not out.exists()


def test_quantized_weights_are_copied_but_not_rounded(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    source = shutil.copytree(tiny_model, tmp_path / "src")
    config = source / "unet/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "x"}}))
    assert "stored quantized: they cannot be rounded to bfloat16" in complaint(source, out, "--dtype", "bfloat16")
    assert shard(source, out).exit_code == 0


def test_a_folder_that_cannot_be_written_to(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written: Not a directory" in complaint(tiny_model, tmp_path / "file" / "out", code=1)
    with pytest.raises(RunError, match="cannot be written"):
        shard_model(tiny_model, tmp_path / "file" / "out")
