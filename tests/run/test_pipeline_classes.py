"""Ten pipeline classes at the first and the last level and within a budget; all of it is in docs/pipelines.md."""

from __future__ import annotations

import pytest

import tightfit
from a_few import a_few
from pipeline_classes import cases
from pipeline_classes.proof import prove
from pipeline_classes.runs import CLOSE, card_of, difference, made, numbers_of
from tiny_pipelines import PIXELS

TRIED = (
    "StableDiffusionXLControlNet", "StableVideoDiffusion", "FluxKontext", "Flux2Klein", "Lumina2", "SkyReelsV2",
    "HunyuanDiT", "AuraFlow", "ZImageControlNet", "Ideogram4",
)  # fmt: skip


@pytest.mark.parametrize("name", a_few(TRIED, "StableDiffusionXLControlNet", "Flux2Klein", "Ideogram4"))
def test_a_small_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the least budget is large enough for pipelines as small as these: what is looked at is that it runs.

    Variants of denoisers' work are left out, as most of what measuring takes.
    """
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 64 * 1024)
    monkeypatch.setattr("tightfit.run.footprints.measure_variants", lambda footprint, play: ())
    row = prove(cases()[name], scale=2, levels=(0, 3), shares=())
    cells = [*row["levels"].values(), *row["budgets"].values()]
    assert not [cell for cell in cells if isinstance(cell, str) or cell > CLOSE]


@pytest.mark.slow
def test_least_budget_when_pages_of_the_allocator_are_used_up() -> None:
    """Rings of two networks with cuBLAS's workspace between them: a page of 20 MiB is 8 KB too small for another."""
    row = prove(cases()["FluxImg2Img"], scale=17, levels=(), shares=())
    assert row["budgets"] == {"least": 0.0}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_pipeline_that_asks_its_first_weight_where_to_compute() -> None:
    case = cases()["Cosmos3Omni"]
    wanted = numbers_of(made(case, 1)(**case.call(PIXELS)))
    with card_of(2**40):
        pipe = made(case, 1)
        tightfit.fit(pipe, level=3, device="simulated:0")
        assert difference(numbers_of(pipe(**case.call(PIXELS))), wanted) <= CLOSE
