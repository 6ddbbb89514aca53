"""Pipelines that change a network's dtype for a while (SDXL decodes in float32), and what is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tightfit
from simulator.conftest import ACCELERATOR
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, run

CASE = next(case for case in CASES if case.name == "StableDiffusionXL")


def upcasting() -> Any:
    pipe = CASE.make().to(torch.float16)
    pipe.vae.register_to_config(force_upcast=True)
    return pipe


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*upcast_vae")
@pytest.mark.parametrize("device", ["loopback", "simulated:0"])
@pytest.mark.parametrize("placement", ["stream", "offload", "resident"])
def test_every_call_decodes_in_float32_and_leaves_float16(placement: str, device: str) -> None:
    use_cards([SimulatedCard(0, ACCELERATOR, Host(), values="real")])
    pipe = upcasting()
    before = {name: value.clone() for name, value in pipe.vae.state_dict().items()}
    wanted = [run(pipe, CASE) for _ in range(2)]
    fitted = tightfit.fit(pipe, plan={"device": device, "components": {"vae": {"placement": placement}}})
    for untouched in wanted:
        found = run(pipe, CASE).cpu()
        assert (found - untouched).abs().max() <= 2e-3  # attention by other kernels on a simulated card
        assert {weight.dtype for weight in pipe.vae.parameters()} == {torch.float16}
        assert not fitted.report().trace.notes  # nothing was fetched layer by layer
    fitted.undo()
    use_cards([])
    after = pipe.vae.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
