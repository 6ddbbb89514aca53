"""What the host does for each kernel and each call of a module, measured on tiny tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tightfit.devices.device import Device

__all__ = ["LEAST_RUNS", "MOST_RUNS", "host_overheads"]

LAUNCHES = 200  # fewer than a card's launch queue holds, so that the host never blocks on it
LEAST_RUNS, MOST_RUNS = 3, 50
WIDTH, HEADS, TOKENS, SIDE = 8, 2, 4, 4  # so small that arithmetic takes no time
# kernels of `_Operations`, and kernels and calls of modules of `_Blocks`; the tests count them
KERNELS_OF_OPERATIONS = 12
KERNELS_OF_BLOCKS, CALLS_OF_BLOCKS = 34, 32


def host_overheads(device: Device, seconds: float) -> dict[str, float]:
    """Host seconds for each kernel, and for each call of a module with what its Python code does, on tiny tensors.

    Operations alone and a U-Net's blocks, which are diffusers' own, run in turns.
    """
    blocks, operations = _Blocks().eval().to(device.torch_device), _Operations(device.torch_device)
    alone: list[float] = []
    called: list[float] = []
    turns = ((operations, KERNELS_OF_OPERATIONS, alone), (blocks, KERNELS_OF_BLOCKS, called))
    operations()
    blocks()
    deadline = time.perf_counter() + seconds
    while len(alone) < LEAST_RUNS or (len(alone) < MOST_RUNS and time.perf_counter() < deadline):
        for run, kernels, runs in turns:
            runs.append(_seconds(device, run, LAUNCHES // kernels))
    launch = statistics.median(alone) / KERNELS_OF_OPERATIONS
    beyond = statistics.median(called) - KERNELS_OF_BLOCKS * launch
    return {"launch_overhead": launch, "module_overhead": max(beyond, 0.0) / CALLS_OF_BLOCKS}


def _seconds(device: Device, run: Callable[[], object], times: int) -> float:
    """Host seconds of one of so many runs."""
    device.synchronize()
    start = device.now()
    for _ in range(times):
        run()
    return (device.now() - start) / times


class _Operations:
    """Those of a transformer block, without a call of any module."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(1, TOKENS, WIDTH, device=device)
        self.weight, self.bias = torch.zeros(WIDTH, WIDTH, device=device), torch.zeros(WIDTH, device=device)

    def __call__(self) -> None:
        normed = self._norm(self.tokens)
        query, key, value = (self._heads(self._linear(normed)) for _ in range(3))
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = self.tokens + self._linear(attended)
        tokens + self._linear(F.gelu(self._linear(self._norm(tokens))))

    def _linear(self, given: torch.Tensor) -> torch.Tensor:
        return F.linear(given, self.weight, self.bias)

    def _norm(self, given: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(given, (WIDTH,), self.bias, self.bias)

    @staticmethod
    def _heads(given: torch.Tensor) -> torch.Tensor:
        return given.view(1, TOKENS, HEADS, -1).transpose(1, 2)


class _Blocks(nn.Module):
    """A residual block and a transformer block of Stable Diffusion's U-Net."""

    def __init__(self) -> None:
        from diffusers.models.attention import BasicTransformerBlock  # takes seconds, and most commands do without
        from diffusers.models.resnet import ResnetBlock2D

        super().__init__()
        head = WIDTH // HEADS
        self.residual = ResnetBlock2D(in_channels=WIDTH, out_channels=2 * WIDTH, temb_channels=WIDTH, groups=HEADS)
        self.transformer = BasicTransformerBlock(WIDTH, HEADS, head, cross_attention_dim=WIDTH)
        self.register_buffer("tokens", torch.zeros(1, TOKENS, WIDTH))
        self.register_buffer("picture", torch.zeros(1, WIDTH, SIDE, SIDE))
        self.register_buffer("time", torch.zeros(1, WIDTH))

    def forward(self) -> None:
        self.residual(self.picture, self.time)
        self.transformer(self.tokens, encoder_hidden_states=self.tokens)
