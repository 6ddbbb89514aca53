"""What a run of the command line decides by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tightfit import InputError, Request
from tightfit.checkpoint.folder import check_folder
from tightfit.run.call_arguments import Prompt
from tightfit.run.job import Job
from tightfit.run.models import stored_dtype
from tiny_pipelines import CASES


def job(model: Path, **settings: Any) -> Job:
    return Job(Prompt("a fox", 1), Request(height=64, width=64, steps=1), choices={}, model=str(model), **settings)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_model_is_taken_in_the_dtype_it_is_stored_in(tmp_path: Path, name: str) -> None:
    """Left alone, the libraries load one half as stored and the other as float32, and the halves do not fit."""
    CASES[0].make().to(dtype=getattr(torch, name), silence_dtype_warnings=True).save_pretrained(tmp_path)
    assert stored_dtype(check_folder(tmp_path).components) == name


@pytest.mark.parametrize(
    "places", [{"out": "a.png", "timeline": "a.png"}, {"timeline": "x/../x/a.png", "out": "x/a.png"}]
)
def test_no_file_is_asked_for_twice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    with pytest.raises(InputError, match="was asked for twice"):
        job(tiny_model, **{name: Path(place) for name, place in places.items()}).prepare()


def test_a_name_that_was_taken_while_it_ran_is_not_overwritten(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    running = job(tiny_model)
    running.prepare()
    running.load()
    Path("a-fox.png").write_bytes(b"somebody else's")
    running.run()
    assert running.written == [Path("a-fox-2.png")]
    assert running.summary()["outputs"] == ["a-fox-2.png"]
    assert Path("a-fox.png").read_bytes() == b"somebody else's"
    with Image.open("a-fox-2.png") as picture:
        assert picture.size == (64, 64)
