"""What the host does for each kernel and each call of a module, measured on tiny tensors."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from tightfit.devices.device import Device

__all__ = ["LEAST_RUNS", "MOST_RUNS", "host_overheads"]

LAUNCHES = 200  # fewer than a card's launch queue holds, so that the host never blocks on it
LEAST_RUNS, MOST_RUNS = 3, 50


def host_overheads(device: Device, seconds: float) -> dict[str, float]:
    """Host seconds for each kernel, and for each call of a module with what its Python code does, on tiny tensors.

    A transformer block runs in turns by its modules and by the same operations alone.
    """
    block = _TimedBlock().to(device.torch_device)
    tokens = torch.zeros(1, 4, _TimedBlock.width, device=device.torch_device)
    block(tokens)
    deadline = time.perf_counter() + seconds
    called: list[float] = []
    bare: list[float] = []
    while len(bare) < LEAST_RUNS or (len(bare) < MOST_RUNS and time.perf_counter() < deadline):
        for run, runs in ((block, called), (block.operations, bare)):
            device.synchronize()
            start = device.now()
            for _ in range(LAUNCHES // _TimedBlock.kernels):
                run(tokens)
            runs.append((device.now() - start) / (LAUNCHES // _TimedBlock.kernels))
    with_modules, without = statistics.median(called), statistics.median(bare)
    return {
        "launch_overhead": without / _TimedBlock.kernels,
        "module_overhead": max(with_modules - without, 0.0) / _TimedBlock.modules_called,
    }


class _TimedBlock(nn.Module):
    """A transformer block, so small that its arithmetic takes no time."""

    width, kernels, modules_called = 8, 12, 10

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(self.width, self.width) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, self.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(tokens)
        attended = self._attended(*(to(normed) for to in (self.to_q, self.to_k, self.to_v)))
        tokens = tokens + self.to_out(attended)
        changed: torch.Tensor = tokens + self.down(self.act(self.up(self.norm2(tokens))))
        return changed

    def operations(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the same without a call of any module."""

        def linear(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
            return F.linear(given, layer.weight, layer.bias)

        def norm(layer: nn.LayerNorm, given: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(given, layer.normalized_shape, layer.weight, layer.bias, layer.eps)

        normed = norm(self.norm1, tokens)
        attended = self._attended(*(linear(to, normed) for to in (self.to_q, self.to_k, self.to_v)))
        tokens = tokens + linear(self.to_out, attended)
        return tokens + linear(self.down, F.gelu(linear(self.up, norm(self.norm2, tokens))))

    def _attended(self, *projected: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.view(*each.shape[:-1], 2, -1).transpose(1, 2) for each in projected)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
