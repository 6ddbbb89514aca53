"""What works next comes while the one before finishes: into the memory that this one gives up, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import MakeCards
from more_pipelines import MORE_CASES
from tightfit import fit
from tightfit.measure.modules import find_components
from tightfit.records import Trace
from tiny_pipelines import CASES, TinyCase, run


def traces_of(pipe: Any, case: TinyCase, plan: dict[str, Any], device: str, wanted: torch.Tensor) -> list[Trace]:
    fitted = fit(pipe, plan={"components": plan}, device=device)
    traces = []
    for _ in range(3):
        assert torch.equal(run(pipe, case).cpu(), wanted)
        traces.append(fitted.report().trace)
    fitted.undo()
    return traces


@pytest.mark.parametrize("name", ["StableDiffusion", "Flux", "StableDiffusionControlNet"])
@pytest.mark.parametrize("placement", ["per-phase", "per-unit"])
def test_the_next_comes_early_and_the_peaks_stay(
    name: str, placement: str, make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.plan.parts.CHUNK", 8192)
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    pipe = case.make()
    wanted = run(pipe, case)
    make_cards()
    plan = {part: {"placement": placement} for part in find_components(pipe)}
    first, *later = traces_of(pipe, case, plan, "pretend:0", wanted)
    for trace in later:
        assert trace.notes == ()
        assert [phase.name for phase in trace.phases] == [phase.name for phase in first.phases]
        assert trace.phases[-1].bytes_in < first.phases[-1].bytes_in
        assert trace.peak_bytes <= first.peak_bytes


def test_no_more_comes_early_than_the_plan_says(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.plan.parts.CHUNK", 8192)
    case = next(case for case in CASES if case.name == "StableDiffusion")
    pipe = case.make()
    make_cards()
    parts = {part: {"placement": "per-phase"} for part in find_components(pipe)}
    late: dict[int | None, int] = {}
    for limit in (None, 50_000, 0):
        order = [{"component": "vae", "method": "decode", "early": limit}]
        fitted = fit(pipe, plan={"components": parts, "order": order}, device="pretend:0")
        run(pipe, case)
        unknowing = fitted.report().trace.phases[-1].bytes_in  # nobody knows who is next
        run(pipe, case)
        late[limit] = fitted.report().trace.phases[-1].bytes_in
        fitted.undo()
    assert late[0] == pytest.approx(unknowing, abs=512)
    assert 0 < late[0] - late[50_000] <= 50_000 < late[0] - late[None]
