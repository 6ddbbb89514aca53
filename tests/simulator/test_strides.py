"""Strides on a simulated card without numbers, beside those that kernels give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from simulator.conftest import MakeCards
from simulator.layouts import CONVOLUTIONS, OTHERS, POINTWISE, Layout, differences, pairs
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator import storage


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs())
@example(
    (
        Layout((1, 4, 3, 2), "channels last", (0, 1, 2, 3), (False,) * 4),
        Layout((1, 4, 3, 2), "contiguous", (0, 1, 2, 3), (False,) * 4),
    )
)
def test_strides_are_those_of_kernels(
    make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch, pair: tuple[Layout, Layout]
) -> None:
    monkeypatch.setattr(storage, "SMALL", 0)
    make_cards(values="shapes")
    card = SimulatedDevice(0).torch_device
    for _ in range(2):  # the second time they are remembered
        assert list(differences(pair, POINTWISE | OTHERS, "cpu", card)) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs(4, 4))
def test_convolutions(make_cards: MakeCards, monkeypatch: pytest.MonkeyPatch, pair: tuple[Layout, Layout]) -> None:
    monkeypatch.setattr(storage, "SMALL", 0)
    make_cards(values="shapes")
    assert list(differences(pair, CONVOLUTIONS, "cpu", SimulatedDevice(0).torch_device)) == []


def test_a_batch_of_one_divided_by_a_number(make_cards: MakeCards) -> None:
    """What an autoencoder does after the attention in its middle: the convolutions after it see no channels last."""
    make_cards(values="shapes")

    def divided(device: str | torch.device) -> tuple[int, ...]:
        tokens = torch.empty(1, 256, 512, device=device).transpose(-1, -2).reshape(1, 512, 16, 16)
        return ((tokens + torch.empty(1, 512, 16, 16, device=device)) / 1.0).stride()

    assert divided(SimulatedDevice(0).torch_device) == divided("cpu") == (512, 1, 8192, 512)


@pytest.mark.parametrize("frames", [1, 3])
def test_a_convolution_of_a_clip_with_channels_last_lies_with_numbers_as_without(
    make_cards: MakeCards, frames: int
) -> None:
    """The CPU's kernel makes ordinary tensors of it, CUDA's keeps channels last."""
    strides = list[tuple[int, ...]]()
    for values in ("real", "shapes"):
        make_cards(values=values)
        card = SimulatedDevice(0).torch_device
        clip = torch.ones(1, 4, frames, 6, 6).to(memory_format=torch.channels_last_3d).to(card)
        maps = torch.nn.functional.conv3d(clip, torch.ones(8, 4, 1, 3, 3, device=card), padding=(0, 1, 1))
        strides.append(maps.stride())
    assert strides == 2 * [(frames * 288, 1, 288, 48, 8)]
