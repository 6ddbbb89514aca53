"""Exporting a model's denoiser without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit import InputError, PlanError, Request, RequestError
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.apply.activations.exported.program import exported_forward
from tightfit.apply.method_overrides import override_class_members
from tightfit.checkpoint.loading import load_pipeline
from tightfit.run.job import export_model
from tightfit.run.models import find_model

SIZE = {"height": 64, "width": 64}


def test_the_demo_model_draws_the_same_with_it(tmp_path: Path) -> None:
    out = tmp_path / "out.traced"
    export_model(None, out, Request(**SIZE, batch=2), device="cpu")
    assert [*tmp_path.iterdir()] == [out]
    pipe: Any = load_pipeline(find_model(None), torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        call = {"num_images_per_prompt": 2, "num_inference_steps": 1, "output_type": "pt", **SIZE}
        pictures: torch.Tensor = pipe("a red circle", generator=torch.Generator().manual_seed(1), **call).images
        return pictures

    wanted = draw()
    override_class_members(pipe.unet, forward=exported_forward(pipe.unet, ExportedFile.load(out)))
    assert torch.equal(draw(), wanted)


@pytest.mark.slow
def test_beside_a_card_it_is_exported_in_a_process_of_its_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    traced = export_model(str(tiny_model), tmp_path / "out.traced", Request(**SIZE), dtype="bfloat16")
    assert {form.dtype for form in traced.manifest.weights.values()} == {"bfloat16"}
    assert str(traced.manifest.inputs["sample"]) == "bfloat16 (2, 4, 16, 16)"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"out": Path("nowhere/out.traced")}, InputError, "cannot write nowhere/out.traced"),
        ({"dtype": "float64"}, InputError, "unknown dtype 'float64'"),
        ({"device": "gpu"}, InputError, "unknown device 'gpu'"),
        ({"name": "transformer"}, PlanError, "unknown component 'transformer'"),
        ({"request": Request(height=63, width=64)}, RequestError, "height 63 is not a multiple of 4"),
        ({"model": "nothing"}, InputError, "nothing"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    tiny_model: Path, tmp_path: Path, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    right = {"model": str(tiny_model), "out": tmp_path / "out.traced", "request": Request(**SIZE)}
    with pytest.raises(error, match=message):
        export_model(**right | wrong)
    assert [*tmp_path.iterdir()] == []
