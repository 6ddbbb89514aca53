"""What is done to activations, with each level, on every tiny pipeline: the same pictures, and no trace."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from inspection import assert_same, imprint
from tightfit import fit
from tightfit.measure.modules import find_components, find_role
from tiny_pipelines import CASES, TinyCase, run

ROUNDING = 2e-6  # of the norm, float32; the worst pixel of a tiny CogVideoX moves by 1.1e-5 of the largest
TECHNIQUES: dict[str, dict[str, Any]] = {
    "chunked attention": {"attention": "chunked"},
    "one item at a time": {"batch": 1},
    "guidance apart": {"guidance": "apart"},
    "guidance together": {"guidance": "together"},
    "feed-forward in chunks": {"feed_forward": 4096},
}
LEVEL = {"chunked attention": 3, "one item at a time": 3, "guidance apart": 2, "guidance together": 3}
COMBINED = [
    pytest.param(technique, level, marks=() if level == LEVEL.get(technique, 1) else pytest.mark.slow)
    for technique in TECHNIQUES
    for level in range(4)
]


@functools.lru_cache(maxsize=1)
def prepared(name: str) -> tuple[TinyCase, Any, torch.Tensor]:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    return case, pipe, run(pipe, case)


@pytest.mark.parametrize(("technique", "level"), COMBINED)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_with_levels(name: str, technique: str, level: int) -> None:
    case, pipe, untouched = prepared(name)
    before = imprint(pipe)
    roles = {part: find_role(part, module) for part, module in find_components(pipe).items()}
    chosen = {part: TECHNIQUES[technique] for part, role in roles.items() if role == "denoiser"}
    fitted = fit(pipe, plan={"level": level, "components": chosen}, device="loopback")
    first, second = run(pipe, case), run(pipe, case)
    trace = fitted.report().trace
    fitted.undo()
    assert trace.lossy == ()
    assert torch.equal(first, second)
    assert float((first - untouched).norm() / untouched.norm()) <= ROUNDING
    assert_same(before, imprint(pipe))
