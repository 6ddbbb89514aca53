"""How much faster convolutions are with channels last: both layouts in turns, by a clock of their own here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn

from tightfit.devices.device import CpuDevice
from tightfit.measure import layout_gains as layouts
from tightfit.measure.layout_gains import channels_last_gain, layout_gains
from tightfit.measure.modules import convolves, head_widths

FULL = torch.float32


class Clocked(nn.Conv2d):
    """A convolution that takes the seconds that it is told, by its weights' layout and how large its input is."""

    def __init__(self, take: Callable[[bool, int], None]) -> None:
        super().__init__(4, 4, 3)
        self.take = [take]  # in a list: a copy of the module tells the same clock

    def __deepcopy__(self, memo: object) -> Clocked:
        return Clocked(*self.take)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        self.take[0](self.weight.is_contiguous(memory_format=torch.channels_last), picture.shape[-1])
        return picture


class Clock:
    """A clock that only stands-in for convolutions move; what else happens slows whatever runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, usual: float, last: float) -> None:
        self.time, self.seconds, self.sides, self.order = 0.0, (usual, last), set[int](), list[bool]()
        self.slowed: Iterator[float] = itertools.repeat(1.0)
        monkeypatch.setattr(time, "perf_counter", lambda: self.time)
        monkeypatch.setattr(layouts, "_stack", lambda channels: Clocked(self.take))

    def take(self, last: bool, side: int) -> None:
        self.sides.add(side)
        self.order.append(last)
        self.time += self.seconds[last] * (side / 32) ** 2 * next(self.slowed)


def test_the_gain_is_how_many_times_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, usual=0.03, last=0.02)
    assert channels_last_gain(CpuDevice(), "denoiser", FULL, 1.0) == pytest.approx(1.5)
    Clock(monkeypatch, usual=0.02, last=0.03)
    assert channels_last_gain(CpuDevice(), "denoiser", FULL, 1.0) == pytest.approx(2 / 3)


def test_a_few_hiccups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, usual=0.03, last=0.02)
    clock.slowed = itertools.cycle([1.0] * 10 + [9.0])
    assert channels_last_gain(CpuDevice(), "denoiser", FULL, 3.0) == pytest.approx(1.5)


def test_they_take_turns_and_neither_is_always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, usual=1.0, last=1.0)
    channels_last_gain(CpuDevice(), "denoiser", FULL, 0.0)
    turns = list(zip(clock.order[::2], clock.order[1::2], strict=True))[2:]  # after warming up and a first look
    assert turns == [(False, True), (True, False)] * 2 + [(False, True)]


@pytest.mark.parametrize(("seconds", "sides"), [(1e-4, {32, 64, 128}), (0.02, {32, 64}), (1.0, {32})])
def test_maps_grow_while_there_is_time(seconds: float, sides: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, usual=seconds, last=seconds)
    channels_last_gain(CpuDevice(), "denoiser", FULL, 1.5)
    assert clock.sides == sides


def test_the_stacks_really_convolve_in_both_layouts() -> None:
    for channels, side in layouts.STACKS.values():
        stack = layouts._stack(channels).eval()
        assert convolves(stack)
        with torch.inference_mode():
            assert stack(torch.randn(1, 4, side // 4, side // 4)).shape == (1, channels[-1], side // 8, side // 8)


def test_what_has_no_kernel_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object, role: str, dtype: torch.dtype, seconds: float) -> float:
        if role == "denoiser":
            raise RuntimeError("no kernel\nat all")
        return 1.25

    monkeypatch.setattr(layouts, "channels_last_gain", refuse)
    assert layout_gains(CpuDevice(), 1.0) == (
        {"autoencoder.float32": 1.25},
        ["cpu: channels last not measured for denoiser.float32: no kernel"],
    )


# which networks it is measured for


def test_what_convolves() -> None:
    assert not convolves(nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 8), nn.Conv2d(8, 8, 1)))  # patches
    assert not convolves(nn.Conv2d(8, 8, 3, groups=8))
    assert convolves(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 3, stride=2)))
    assert not convolves(nn.Sequential(nn.Conv3d(8, 8, 3), nn.Conv2d(8, 8, 3)))  # mostly over clips


def test_how_wide_heads_are() -> None:
    few = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    unet = UNet2DConditionModel(
        **few, down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
        attention_head_dim=(2, 8), layers_per_block=1, cross_attention_dim=16,
    )  # fmt: skip
    assert head_widths(unet) == (8, 16)  # "attention_head_dim" is how many there are: 32 / 2 and 64 / 8
    assert head_widths(AutoencoderKL(**few, down_block_types=("DownEncoderBlock2D",) * 2)) == (64,)
    assert head_widths(nn.Linear(4, 4)) == ()
