"""Weights that are read when they are used: their files must be what they were when the model was loaded."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit import ModelError, TightfitError, load
from tightfit.files import FileState
from tightfit.measure import build_models as building
from tiny_pipelines import CASES, run

CASE = next(case for case in CASES if case.name == "StableDiffusion")
ON_DISK = {"components": {"unet": {"placement": "stream", "offload_to": "disk"}}}


def overwrite(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-64, os.SEEK_END)
        stream.write(bytes(64))


def overwrite_and_set_time_back(file: Path) -> None:
    status = file.stat()
    overwrite(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(file: Path) -> None:
    """Another file takes its name, of the same size and time."""
    other = file.with_name("other")
    shutil.copy2(file, other)
    overwrite_and_set_time_back(other)
    other.replace(file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 64)


def put_a_fifo_there(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_a_folder_there(file: Path) -> None:
    file.unlink()
    file.mkdir()


CHANGES = [overwrite, overwrite_and_set_time_back, replace, cut, put_a_fifo_there, put_a_folder_there, Path.unlink]


@pytest.fixture
def loaded(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(building, "LARGE", 256)  # also tiny networks are built without weights
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    made = load(folder, plan=ON_DISK, device="cpu", dtype="float32")
    made.pipe.set_progress_bar_config(disable=True)
    yield made
    with contextlib.suppress(TightfitError):  # it closes the files, which may no longer be those that it wants
        made.fitted.undo()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "model" / "unet").glob("*.safetensors")
    return file


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_first_call(change: Callable[[Path], None], loaded: Any, weights: Path) -> None:
    change(weights)
    with pytest.raises(ModelError, match=r"cannot be read|was changed while it was in use") as error:
        run(loaded.pipe, CASE)
    assert str(weights) in str(error.value)


@pytest.mark.parametrize("change", [overwrite, overwrite_and_set_time_back, cut])
def test_a_change_between_two_calls(change: Callable[[Path], None], loaded: Any, weights: Path) -> None:
    run(loaded.pipe, CASE)
    change(weights)
    with pytest.raises(ModelError, match=f"{weights} was changed while it was in use"):
        run(loaded.pipe, CASE)


@pytest.mark.parametrize("change", [overwrite, overwrite_and_set_time_back, cut])
def test_a_change_during_a_call(change: Callable[[Path], None], loaded: Any, weights: Path) -> None:
    """The first step has read all weights; the second one reads them again."""

    def write(*_: Any) -> dict[str, Any]:
        change(weights)
        return {}

    with pytest.raises(ModelError, match=f"{weights} was changed while it was in use"):
        loaded.pipe(**CASE.call(), callback_on_step_end=write)


def test_an_open_file_that_is_replaced_is_read_on(loaded: Any, weights: Path) -> None:
    wanted = run(loaded.pipe, CASE)
    replace(weights)
    assert torch.equal(run(loaded.pipe, CASE), wanted)
    loaded.fitted.undo()
    assert torch.equal(run(loaded.pipe, CASE), wanted)


def test_what_shows_a_change() -> None:
    before = FileState(1, 2, 300, 4, 5, 1)
    assert before.is_still(before)
    assert before.is_still(before._replace(changed=6, names=2))  # it has another name, too
    assert not before.is_still(before._replace(changed=6))
    for name in ("device", "inode", "size", "modified"):
        assert not before.is_still(before._replace(**{name: 7}))
    still_written = FileState(1, 2)
    assert still_written.is_still(before)
    assert not still_written.is_still(before._replace(inode=7))
