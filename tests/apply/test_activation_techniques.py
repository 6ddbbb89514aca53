"""What is done to activations, with each level, on every tiny pipeline: the same pictures, and no trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inspection import assert_same, imprint
from tightfit import fit
from tightfit.apply.activations.vae_tiling import tiled
from tightfit.measure.modules import find_components, find_role
from tiny_pipelines import CASES, TinyCase, run

ROUNDING = 2e-6  # of the norm, float32; the worst pixel of a tiny CogVideoX moves by 1.1e-5 of the largest
NAMES = [case.name for case in CASES]
DENOISER: dict[str, dict[str, Any]] = {
    "chunked attention": {"attention": "chunked"},
    "one item at a time": {"max_batch": 1},
    "guidance apart": {"cfg": "sequential"},
    "guidance together": {"cfg": "batched"},
    "feed-forward in chunks": {"ffn_chunk": 4096},
}
AUTOENCODER: dict[str, dict[str, Any]] = {
    "strips, maps on the device": {"strips": 250_000},
    "strips, maps in host memory": {"strips": 250_000, "feature_maps": "host"},
    "strips, maps again": {"strips": 250_000, "feature_maps": "recompute"},
}
# the level of each, and the pipelines, that are not left to the slow tests
LEVEL = {
    "chunked attention": 3,
    "one item at a time": 3,
    "guidance apart": 2,
    "guidance together": 3,
    "feed-forward in chunks": 1,
    "strips, maps on the device": 1,
    "strips, maps in host memory": 3,
    "strips, maps again": 2,
}
# taking an autoencoder apart takes seconds; of the others each is tried on a fourth of the pipelines
PIPELINES: dict[str, Sequence[str]] = {technique: NAMES[number % 4 :: 4] for number, technique in enumerate(DENOISER)}
PIPELINES |= {
    "strips, maps on the device": ("StableDiffusion3",),
    "strips, maps in host memory": ("FluxImg2Img",),
    "strips, maps again": ("Flux",),
}
COMBINED = [
    pytest.param(name, technique, level, marks=() if soon else pytest.mark.slow)
    for name in NAMES
    for technique in LEVEL
    for level in range(4)
    for soon in [level == LEVEL[technique] and name in PIPELINES[technique]]
]


@functools.lru_cache(maxsize=1)
def prepared(name: str) -> tuple[TinyCase, Any, torch.Tensor]:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    return case, pipe, run(pipe, case)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "technique", "level"), COMBINED)
def test_with_levels(name: str, technique: str, level: int) -> None:
    case, pipe, untouched = prepared(name)
    before = imprint(pipe)
    roles = {part: find_role(part, module) for part, module in find_components(pipe).items()}
    denoisers = [part for part, role in roles.items() if role == "denoiser"]
    chosen = {
        "components": dict.fromkeys(denoisers, DENOISER.get(technique, {})),
        "vae": AUTOENCODER.get(technique, {}),
    }
    fitted = fit(pipe, plan={"level": level, **chosen}, device="loopback")
    first, second = run(pipe, case), run(pipe, case)
    trace = fitted.report().trace
    fitted.undo()
    assert trace.lossy == ()
    assert not [note for note in trace.notes if "runs whole" in note]
    assert torch.equal(first, second)
    assert float((first - untouched).norm() / untouched.norm()) <= ROUNDING
    assert_same(before, imprint(pipe))


def test_sound_is_not_tiled() -> None:
    """Of three dimensions, the last but one are channels."""
    latents = torch.randn(1, 64, 100)
    assert torch.equal(tiled(torch.sin, 16, 0.25, 1)(latents), latents.sin())
