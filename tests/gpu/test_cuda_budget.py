"""Budgets on a real card: kept to, capped, and the same picture."""

from __future__ import annotations

import pytest
import torch

import tightfit
from inspection import assert_same, imprint
from tightfit.devices.cuda import cuda_count
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

SIZE = 512 * 2**20


@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_a_budget_is_kept_to_and_capped(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    before = imprint(pipe)
    tightfit.fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted = tightfit.fit(pipe, budget=SIZE, device="cuda")
    found = run(pipe, case).cpu()
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    assert max(phase.peak_reserved for phase in fitted.report().trace.phases) <= SIZE
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(SIZE + 2**21, dtype=torch.uint8, device="cuda")
    fitted.undo()
    assert_same(before, imprint(pipe))
    torch.empty(SIZE + 2**21, dtype=torch.uint8, device="cuda")
