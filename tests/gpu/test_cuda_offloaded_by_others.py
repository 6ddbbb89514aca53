"""diffusers' own offloading on a card: replaced by a plan for the same card, and put back by undo()."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from tightfit import fit
from tightfit.devices.cuda_support import cuda_count
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

CASE = next(case for case in CASES if case.name == "StableDiffusion")


def by_model(pipe: Any) -> None:
    pipe.enable_model_cpu_offload()


def by_layer(pipe: Any) -> None:
    pipe.enable_sequential_cpu_offload()


def by_group(pipe: Any) -> None:
    pipe.enable_group_offload("cuda", offload_type="leaf_level", use_stream=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    CASE.make().save_pretrained(path)
    return path


@pytest.mark.parametrize("devices", ["cuda", "balanced"])
@pytest.mark.parametrize("asked", [{"level": 2}, {"budget": "1GB"}], ids=["level", "budget"])
def test_a_pipeline_that_was_loaded_with_a_device_map(folder: Path, devices: str, asked: Any) -> None:
    pipe = DiffusionPipeline.from_pretrained(folder, device_map=devices)
    pipe.set_progress_bar_config(disable=True)
    by_itself, where = run(pipe, CASE), str(pipe.hf_device_map)
    fitted = fit(pipe, **asked)
    found = run(pipe, CASE)
    assert (found - by_itself).abs().max() <= 1e-5
    fitted.undo()
    assert torch.equal(run(pipe, CASE), by_itself)
    assert str(pipe.hf_device_map) == where


@pytest.mark.parametrize("asked", [{"level": 2}, {"budget": "1GB"}], ids=["level", "budget"])
@pytest.mark.parametrize("offload", [by_model, by_layer, by_group])
def test_a_plan_replaces_it(offload: Callable[[Any], None], asked: Any) -> None:
    pipe, plain = CASE.make(), CASE.make()
    plain_handle = fit(plain, device="cuda", **asked)
    wanted = run(plain, CASE)
    plain_handle.undo()
    offload(pipe)
    by_themselves = run(pipe, CASE)
    fitted = fit(pipe, **asked)
    assert fitted.plan.device == "cuda:0"
    assert torch.equal(run(pipe, CASE), wanted)
    fitted.undo()
    assert fitted.live().weights == 0
    assert torch.equal(run(pipe, CASE), by_themselves)
