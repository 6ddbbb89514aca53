"""The model that ships: small, safetensors only, and as good as its card says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from tightfit import fit
from tightfit.checkpoint.loading import load_pipeline
from tightfit.demo.judge import judge
from tightfit.demo.scenes import parse
from tightfit.run.models import find_model

ROOT = Path(__file__).parent.parent.parent
PROMPTS = (
    "a large red circle on the left and a small blue square on the right",
    "a large green triangle at the top",
    "a green triangle at the top and a red circle at the bottom",
)


def test_it_is_small_and_holds_no_pickle() -> None:
    files = [file for file in find_model(None).path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 25_000_000
    assert {file.suffix for file in files} <= {".json", ".txt", ".md", ".safetensors"}


def test_it_draws_what_its_readme_shows() -> None:
    pipe = load_pipeline(find_model(None), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    fit(pipe, level=0, device="cpu")
    generators = [torch.Generator().manual_seed(7 + index) for index in range(len(PROMPTS))]
    pictures = pipe(list(PROMPTS), num_inference_steps=20, guidance_scale=2.5, generator=generators, output_type="np")
    for prompt, picture in zip(PROMPTS, pictures.images, strict=True):
        scene = parse(prompt)
        assert scene is not None
        assert judge((picture * 255).round().astype(np.uint8), scene).complaint == ""


def test_its_card_and_the_readme_say_what_was_measured() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/make_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_its_scores_reach_what_was_aimed_at() -> None:
    facts = json.loads((ROOT / "bench/results/demo-score.json").read_text())
    assert facts["one_object"]["prompts"] + facts["two_objects"]["prompts"] >= 300
    assert facts["one_object"]["share"] >= 0.95
    assert facts["two_objects"]["share"] >= 0.75
