"""Whether a network's settings are still those with which its program was exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

from tightfit.apply.context_parallel.settings import NetworkSettings
from tiny_pipelines import CASES


def unet() -> Any:
    return CASES[0].make().unet


def test_a_call_and_other_weights_change_no_setting() -> None:
    network = unet()
    settings = NetworkSettings(network)
    with torch.no_grad():
        network(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 8, network.config.cross_attention_dim))
        for tensor in network.parameters():
            tensor.add_(1)
    first = next(network.parameters())
    network.conv_in.weight = torch.nn.Parameter(first.detach().clone())
    assert settings.unchanged


def rescale(network: Any) -> None:
    next(part for part in network.modules() if hasattr(part, "output_scale_factor")).output_scale_factor = 3.0


def add_an_adapter(network: Any) -> None:
    from peft import LoraConfig

    network.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))


def scale_an_adapter(network: Any) -> None:
    network.set_adapters(["default"], weights=[0.25])


def free_u(network: Any) -> None:
    network.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def other_processors(network: Any) -> None:
    network.set_attn_processor(AttnProcessor())


@pytest.mark.parametrize("change", [rescale, add_an_adapter, free_u, other_processors])
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    network = unet()
    settings = NetworkSettings(network)
    change(network)
    assert not settings.unchanged


def test_another_scale_of_an_adapter_is_noticed() -> None:
    network = unet()
    add_an_adapter(network)
    settings = NetworkSettings(network)
    assert settings.unchanged
    scale_an_adapter(network)
    assert not settings.unchanged
