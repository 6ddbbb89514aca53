"""Parameters that carry more than numbers: refused by name where a plan would have to move them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inspection import assert_same, imprint
from tightfit import PlanError, fit


class Quantised(nn.Parameter):
    """As those of bitsandbytes: what its numbers mean is an attribute."""

    quant_state: str


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    weight = Quantised(torch.ones(512, 512), requires_grad=False)
    weight.quant_state = "nf4"
    model[1].weight = weight
    return model


@pytest.mark.parametrize("placement", ["offload", "stream"])
@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_what_cannot_be_moved_is_refused_by_name(placement: str, store: str) -> None:
    model = network()
    before = imprint(model)
    plan = {"components": {"model": {"placement": placement, "offload_to": store}}}
    with pytest.raises(PlanError, match=r"model: 1\.weight is a Quantised.*load model without"):
        fit(model, plan=plan, device="loopback")
    assert_same(before, imprint(model))


@pytest.mark.parametrize("storage", ["as-loaded", "float8_e4m3fn"])
def test_what_stays_where_it_is_may_be_anything(storage: str) -> None:
    model = network()
    wanted = model(torch.zeros(1, 512))
    plan = {"components": {"model": {"placement": "resident", "storage": storage}}}
    fitted = fit(model, plan=plan, device="loopback")
    assert torch.equal(model(torch.zeros(1, 512)), wanted)
    assert model[1].weight.quant_state == "nf4"
    fitted.undo()
    assert model[1].weight.quant_state == "nf4"
