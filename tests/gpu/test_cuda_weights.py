"""Weights that travel to a real card: from every home, through rings and staging, and while others finish."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inspection import assert_same, imprint
from tightfit import fit
from tightfit.apply.weights import staging
from tightfit.devices.cuda import cuda_count
from tightfit.measure.modules import find_components
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

HOMES: dict[str, dict[str, Any]] = {
    "pinned": {"home": "host", "pinned": True},
    "plain": {"home": "host", "pinned": False},
    "disk": {"home": "disk"},
}


@pytest.mark.parametrize("placement", ["per-phase", "per-unit"])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_every_home_gives_the_bits_of_a_resident_model(
    name: str, home: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.plan.parts.CHUNK", 64 * 1024)
    monkeypatch.setattr(staging, "SIZE", 64 * 1024)
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    run(pipe, case)  # transformers installs hooks of its own at the first call
    before = imprint(pipe)
    fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    plan = {part: HOMES[home] | {"placement": placement} for part in find_components(pipe)}
    fitted = fit(pipe, plan={"components": plan}, device="cuda")
    peaks = []
    for _ in range(4):  # from the second on, the next comes while the one before finishes
        assert torch.equal(run(pipe, case).cpu(), wanted)
        peaks.append(fitted.report().trace.peak_bytes)
    assert max(peaks[1:]) <= 1.02 * peaks[0]
    assert fitted.live().weights == 0
    fitted.undo()
    assert_same(before, imprint(pipe))


def test_compiled_blocks_on_the_card() -> None:
    case = next(case for case in CASES if case.name == "Flux")
    pipe: Any = case.make()
    pipe.transformer.compile_repeated_blocks(backend="aot_eager")
    fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted = fit(pipe, level=3, device="cuda")
    for _ in range(2):
        assert torch.equal(run(pipe, case).cpu(), wanted)
    fitted.undo()
