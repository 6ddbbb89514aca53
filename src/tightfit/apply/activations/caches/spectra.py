"""Filters over the frequencies of pictures and clips, in which every channel is filtered by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tightfit.apply.activations.caches.denoising_pipeline import NoiseLevel

__all__ = ["Gain", "circular_gain", "filtered", "noise_removing_gain"]

Gain = Sequence[torch.Tensor]  # factors for frequencies, as `torch.fft.rfftn` orders them, which are multiplied

CHUNK = 2**24  # elements that are filtered at a time: some 200 MiB while they are
LEAST = 1e-6  # signal or noise that is assumed at least


def filtered(tensor: torch.Tensor, gain: Gain, axes: Sequence[int]) -> torch.Tensor:
    """Return `tensor` with its frequencies along `axes` multiplied by `gain`, in its own dtype.

    Channels that are the last axis are taken in chunks, so that a large tensor's spectrum is never there as a whole.
    """
    last = tensor.ndim - 1
    if last in axes or tensor.numel() <= CHUNK:
        return _filtered(tensor, gain, axes)
    result = torch.empty_like(tensor)
    size = max(CHUNK * tensor.shape[last] // tensor.numel(), 1)
    for start in range(0, tensor.shape[last], size):
        some = slice(start, start + size)
        result[..., some] = _filtered(tensor[..., some], gain, axes)
    return result


def _filtered(tensor: torch.Tensor, gain: Gain, axes: Sequence[int]) -> torch.Tensor:
    exact = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    spectrum = torch.fft.rfftn(exact, dim=tuple(axes))
    del exact
    for factor in gain:
        spectrum.mul_(factor)
    result: torch.Tensor = torch.fft.irfftn(spectrum, s=[tensor.shape[axis] for axis in axes], dim=tuple(axes))
    return result.to(tensor.dtype)


def noise_removing_gain(
    tensor: torch.Tensor, axes: Sequence[int], level: NoiseLevel, exponent: float
) -> list[torch.Tensor]:
    """Return the gain that removes noise of `level`: of the best linear filter for pictures of power 1/f**`exponent`.

    Each axis has a factor of its own, with a mean of 1 over all of its frequencies (SeaCache, arXiv:2602.18993).
    """
    signal, noise = max(level.signal, LEAST), max(level.noise, LEAST)
    factors = []
    for axis in axes:
        size = tensor.shape[axis]
        frequencies = torch.fft.fftfreq(size, device=tensor.device, dtype=torch.float32).abs()
        power = 1.0 / (frequencies.pow(exponent) + 1e-16)
        gain = signal * power / (signal**2 * power + noise**2)
        gain = gain / gain.mean()
        factors.append(_along(gain[: size // 2 + 1] if axis == axes[-1] else gain, axis, tensor.ndim))
    return factors


def circular_gain(tensor: torch.Tensor, axes: Sequence[int], low: float, high: float) -> list[torch.Tensor]:
    """Return the gain that is `low` in a circle of frequencies of rows and columns (two `axes`), and `high` outside.

    The radius is a fifth of the shorter side.
    """
    rows, columns = (tensor.shape[axis] for axis in axes)
    radius = min(rows, columns) // 5
    down = torch.fft.fftfreq(rows, 1 / rows, device=tensor.device).square()
    across = torch.fft.rfftfreq(columns, 1 / columns, device=tensor.device).square()
    square = _along(down, axes[0], tensor.ndim) + _along(across, axes[1], tensor.ndim)
    return [torch.where(square <= radius**2 + 0.5, low, high)]


def _along(values: torch.Tensor, axis: int, ndim: int) -> torch.Tensor:
    return values.reshape([-1 if each == axis else 1 for each in range(ndim)])
