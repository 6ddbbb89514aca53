"""What a network is given in host memory comes to the card: pipelines pass on tensors as their users gave them."""

from __future__ import annotations

import pytest
import torch

import tightfit
from simulator.conftest import MakeCards
from tightfit.apply.cross_device import CrossDeviceCall
from tightfit.devices.simulated import SimulatedDevice
from tiny_pipelines import CASES


@pytest.mark.parametrize("level", [0, 3])
def test_arguments_come_wherever_they_are(level: int, make_cards: MakeCards) -> None:
    make_cards()
    unet = next(case for case in CASES if case.name == "StableDiffusionXL").make().unet
    side, width, pooled = unet.config.sample_size, unet.config.cross_attention_dim, unet.add_embedding.linear_1
    ids = torch.zeros(1, 6)
    sizes = unet.config.addition_time_embed_dim * ids.shape[1]
    given = {
        "encoder_hidden_states": torch.randn(1, 7, width),
        "added_cond_kwargs": {"text_embeds": torch.randn(1, pooled.in_features - sizes), "time_ids": ids},
    }
    sample = torch.randn(1, unet.config.in_channels, side, side)
    with torch.no_grad():
        wanted = unet(sample, 5, **given).sample
        fitted = tightfit.fit(unet, level=level, device="simulated:0")
        found = unet(sample, torch.tensor(5), **given).sample
        fitted.undo()
    assert found.device.type == "privateuseone"
    assert torch.equal(found.cpu(), wanted)


def test_single_numbers_stay(make_cards: MakeCards) -> None:
    """Kernels take them from the host: a copy to the card would be for nothing."""
    make_cards()
    device = SimulatedDevice(0)
    step, rows = CrossDeviceCall(device, device).around(lambda *args: args)(torch.tensor(3), torch.ones(2))
    assert (step.device.type, rows.device.type) == ("cpu", "privateuseone")
