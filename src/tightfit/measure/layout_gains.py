"""A device → the speedup of convolutions on it with channels-last weights.

It measures what a plan does: convolutions' weights change their memory format, and the layers between keep it or not,
as torch does on the device. Autoencoders and U-Nets gain by different amounts (large maps with few channels, small maps
with many), so each has a stack of its own. Both layouts run alternately, so that other load on the computer slows both,
and the median of the ratios is taken.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from tightfit.devices.device import Device

__all__ = ["channels_last_gain", "layout_gains"]

STACKS = {"denoiser": ((320, 640), 32), "autoencoder": ((128, 256), 64)}  # channels, and side of the smallest maps
SIZES = 3  # number of sizes at most: each has twice the side of the previous one
LEAST_TURNS, MOST_TURNS = 5, 25
SHORTEST = 0.005  # seconds: shorter runs are repeated and timed together


def layout_gains(device: Device, seconds: float) -> tuple[dict[str, float], list[str]]:
    """Return the gain of each stack in each dtype ("autoencoder.float32"), and notes on those not measured.

    On a CPU in single precision only: without instructions for half precision it takes a hundred times as long.
    """
    halves = () if device.torch_device.type == "cpu" else (torch.float16, torch.bfloat16)
    kinds = [(role, dtype) for role in STACKS for dtype in (torch.float32, *halves)]
    gains: dict[str, float] = {}
    notes = []
    with torch.inference_mode():
        for role, dtype in kinds:
            name = f"{role}.{str(dtype).removeprefix('torch.')}"
            try:
                gains[name] = channels_last_gain(device, role, dtype, seconds / len(kinds))
            except RuntimeError as error:  # from torch: no kernel, too little memory
                reason, *_ = str(error).splitlines() or [type(error).__name__]
                notes.append(f"{device.name}: channels last not measured for {name}: {reason}")
            device.release_cache()
    return gains, notes


def channels_last_gain(device: Device, role: str, dtype: torch.dtype, seconds: float) -> float:
    """Time of a stack of convolutions in `dtype` with contiguous weights, divided by that with channels-last weights.

    The stack is like those in components of this `role`, one of STACKS; its maps are the largest for which there are
    enough runs in `seconds`. RuntimeError from torch where it has no kernel.
    """
    channels, side = STACKS[role]
    usual = _stack(channels).to(device.torch_device, dtype)
    other = copy.deepcopy(usual)
    for weight in other.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    deadline = time.perf_counter() + seconds
    for size in range(SIZES):
        picture = torch.randn(1, 4, side * 2**size, side * 2**size).to(device.torch_device, dtype)
        works = [functools.partial(network, picture) for network in (usual, other)]
        for work in works:  # libraries select their kernels at the first call
            work()
        taken = sum(device.seconds(work) for work in works)
        if time.perf_counter() + (2 + LEAST_TURNS) * 4 * taken > deadline:  # the next size takes four times as long
            break
    return _ratio(device, works[0], works[1], math.ceil(2 * SHORTEST / max(taken, 1e-6)), deadline)


def _ratio(
    device: Device, usual: Callable[[], object], other: Callable[[], object], times: int, deadline: float
) -> float:
    """Median ratio of the time of `usual` to that of `other`, from several runs."""

    def seconds(work: Callable[[], object]) -> float:
        return device.seconds(lambda: [work() for _ in range(times)])

    ratios: list[float] = []
    while len(ratios) < LEAST_TURNS or (len(ratios) < MOST_TURNS and time.perf_counter() < deadline):
        if len(ratios) % 2:  # the order alternates, as the second finds caches filled by the first
            after, before = seconds(other), seconds(usual)
        else:
            before, after = seconds(usual), seconds(other)
        ratios.append(before / after)
    return statistics.median(ratios)


def _stack(channels: tuple[int, ...]) -> nn.Module:
    """A convolution to the first of `channels`, then a normalized one for each width; strided ones change the width."""
    layers: list[nn.Module] = [nn.Conv2d(4, channels[0], 3, padding=1), *_convolved(channels[0])]
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), *_convolved(after)]
    return nn.Sequential(*layers).eval()


def _convolved(channels: int) -> list[nn.Module]:
    return [nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)]
