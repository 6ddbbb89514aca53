"""Weights that a network makes anew on the simulated card go to host memory with the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from replaced_weights import PLACEMENTS, check_renewed
from simulator.conftest import MakeCards
from tightfit.apply.weights.tensor_loader import TensorLoader
from tightfit.devices.simulated import SimulatedDevice
from tightfit.measure.recorder import Recorder


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_network_renews_goes_home(placement: str, make_cards: MakeCards) -> None:
    make_cards()
    with torch.no_grad():
        check_renewed(placement, "simulated:0", torch.rand(2, 64).to("privateuseone:0"))


def test_a_component_inside_another_keeps_its_copies(make_cards: MakeCards) -> None:
    make_cards()
    device, inner = SimulatedDevice(0), nn.Linear(64, 64)
    recorder = Recorder(device)
    loaders = [TensorLoader(part, device, recorder) for part in (nn.Sequential(inner, nn.Linear(64, 64)), inner)]
    for loader in loaders:
        loader.load()
    loaders[0].evict()
    assert inner.weight.device == device.torch_device
    loaders[1].evict()
