"""Budgets on a real card: kept to, capped, and the same picture."""

from __future__ import annotations

import pytest
import torch

import tightfit
from inspection import assert_same, imprint
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.modules import find_components, find_role
from tightfit.run.call_arguments import request_of
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

SIZE = 512 * 2**20


@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_a_budget_is_kept_to_and_capped(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    run(pipe, case)  # transformers installs hooks of its own at the first call
    before = imprint(pipe)
    tightfit.fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted = tightfit.fit(pipe, budget=SIZE, request=request_of(pipe, (), case.call()), device="cuda")
    found = run(pipe, case).cpu()
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    assert max(phase.peak_reserved for phase in fitted.report().trace.phases) <= SIZE
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(SIZE + 2**21, dtype=torch.uint8, device="cuda")
    fitted.undo()
    assert_same(before, imprint(pipe))
    torch.empty(SIZE + 2**21, dtype=torch.uint8, device="cuda")


def test_copies_of_a_process_that_uses_a_card_measure_for_it(copies: list[object]) -> None:
    """Garbage that is on the card, and streams at work, are the first process's alone."""
    case = next(case for case in CASES if case.name == "StableDiffusionXL")
    pipe = case.make()
    fitted = tightfit.fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted.undo()
    garbage: list[object] = [torch.ones(2**20, device="cuda")]
    garbage.append(garbage)
    del garbage
    request = request_of(pipe, (), case.call())
    footprint = tightfit.measure_footprint(pipe, request)
    assert copies
    assert footprint.not_measured == ()
    tightfit.fit(pipe, budget=SIZE, request=request, device="cuda")
    found = run(pipe, case).cpu()
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.skipif(cuda_count() < 2, reason="needs two CUDA cards")
@pytest.mark.parametrize("placement", ["resident", "offload", "stream"])
@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Wan"])
def test_components_on_another_card_change_no_numbers(name: str, placement: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    tightfit.fit(pipe, level=0, device="cuda:0")
    wanted = run(pipe, case).cpu()
    parts = find_components(pipe).items()
    moved = [part for part, module in parts if find_role(part, module) != "denoiser"]
    elsewhere = {part: {"device": "cuda:1", "placement": placement} for part in moved}
    fitted = tightfit.fit(pipe, plan={"device": "cuda:0", "components": elsewhere})
    assert torch.equal(run(pipe, case).cpu(), wanted)
    assert max(phase.other_devices["cuda:1"] for phase in fitted.report().trace.phases) > 0


@pytest.mark.skipif(cuda_count() < 2, reason="needs two CUDA cards")
def test_each_card_keeps_to_its_budget() -> None:
    case = next(case for case in CASES if case.name == "StableDiffusionXL")
    pipe = case.make()
    budget = {"cuda:0": SIZE, "cuda:1": SIZE}
    fitted = tightfit.fit(pipe, budget=budget, request=request_of(pipe, (), case.call()))
    run(pipe, case)
    report = str(fitted.report())
    assert "budget of cuda:0" in report
    assert "over by" not in report
    for name in ("cuda:0", "cuda:1"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(SIZE + 2**21, dtype=torch.uint8, device=name)
    fitted.undo()
    for name in budget:
        torch.empty(SIZE + 2**21, dtype=torch.uint8, device=name)
