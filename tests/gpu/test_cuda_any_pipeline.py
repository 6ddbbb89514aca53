"""A live pipeline that was called, with a LoRA and hooks of its owner's, within the least budget there is for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

import tightfit
from inspection import assert_same, imprint
from tightfit import BudgetTooSmall
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.modules import find_components, find_role
from tightfit.run.shape import request_of
from tiny_pipelines import CASES, TinyCase, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]


def add_past(pipe: Any, case: TinyCase) -> list[str]:
    """Calls `pipe`, and gives its denoiser a LoRA and all components hooks, which list their passes."""
    run(pipe, case)
    passes: list[str] = []
    torch.manual_seed(0)
    for name, module in find_components(pipe).items():
        if find_role(name, module) == "denoiser" and hasattr(module, "add_adapter"):
            module.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        module.register_forward_hook(lambda module, args, output, name=name: passes.append(name))
    run(pipe, case)
    return passes


def least_budget(pipe: Any, request: tightfit.Request | None) -> int:
    with pytest.raises(BudgetTooSmall) as caught:
        tightfit.fit(pipe, budget=1, device="cuda", request=request)
    needed: Any = caught.value.facts["needed_bytes"]
    return int(needed)


QUICK = ("StableDiffusionXL", "Flux", "Wan")
SOME = [case if case.name in QUICK else pytest.param(case, marks=pytest.mark.full) for case in CASES]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_the_least_budget_gives_what_level_0_gives(case: TinyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.plan.parts.CHUNK", 64 * 1024)
    pipe: Any = case.make()
    passes = add_past(pipe, case)
    before = imprint(pipe)
    fitted = tightfit.fit(pipe, level=0, device="cuda")
    passes.clear()
    wanted = run(pipe, case).cpu()
    usual = list(passes)
    fitted.undo()
    request = request_of(pipe, (), case.call())
    torch.cuda.empty_cache()
    budget = least_budget(pipe, request)
    fitted = tightfit.fit(pipe, budget=budget, device="cuda", request=request)
    moving = [name for name, part in fitted.plan.components.items() if part.placement != "resident"]
    assert moving
    for _ in range(2):
        passes.clear()
        found = run(pipe, case).cpu()
        if fitted.plan.vae.cuts:  # sums in another order
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        else:
            assert torch.equal(found, wanted)
        assert passes == usual  # the owner's hooks saw what they always see, once each
        assert max(phase.peak_reserved for phase in fitted.report().trace.phases) <= budget
        assert not [note for note in fitted.report().trace.notes if "could not" in note or "out of memory" in note]
    fitted.undo()
    assert_same(before, imprint(pipe))
