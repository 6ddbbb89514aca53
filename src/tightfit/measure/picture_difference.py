"""How much pictures differ: peak signal-to-noise ratio, and structural similarity (Wang et al. 2004)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from tightfit.errors import InputError
from tightfit.schema.results import PictureDifference

__all__ = ["mean_psnr", "picture_differences", "psnr", "ssim"]

WINDOW, SIGMA = 11, 1.5  # pixels of the Gaussian window, and its standard deviation
K1, K2 = 0.01, 0.03  # constants of SSIM, for values between 0 and 1


def psnr(a: Tensor, b: Tensor) -> float:
    """Return the peak signal-to-noise ratio of pictures [N, C, H, W] with values from 0 to 1: the mean over N, in dB.

    Pictures that are identical have no ratio and are left out of the mean, so that it does not hide the others;
    infinite if all are. NaN if a picture has NaN. InputError if the tensors are no floating-point ones of one shape.
    """
    ratios = _ratios(*_checked(a, b))
    return mean_psnr([float(ratio) for ratio in ratios])


def ssim(a: Tensor, b: Tensor) -> float:
    """Return the structural similarity of pictures [N, C, H, W] with values from 0 to 1: the mean over N; at most 1.

    Each channel by itself, in a Gaussian window of 11 × 11 pixels, where all of it is inside the picture. InputError
    as `psnr`, and for pictures that are smaller than the window.
    """
    return float(_similarities(*_checked(a, b)).mean())


def picture_differences(reference: Tensor, other: Tensor) -> list[PictureDifference]:
    """Return the difference of each picture of `other` [N, C, H, W] from that of `reference`.

    Values are from 0 to 1. InputError as `ssim`.
    """
    pairs = _checked(reference, other)
    ratios, similarities = _ratios(*pairs), _similarities(*pairs)
    return [PictureDifference(*map(float, pair)) for pair in zip(ratios, similarities, strict=True)]


def mean_psnr(ratios: list[float]) -> float:
    """Return the mean of `ratios` in dB without those that are infinite; infinite if all are."""
    finite = [ratio for ratio in ratios if ratio != math.inf]
    return sum(finite) / len(finite) if finite else math.inf


def _checked(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float64 on the device of `a`."""
    if a.shape != b.shape or a.ndim != 4 or not a.numel():
        raise InputError(f"pictures must be [N, C, H, W] of one shape, not {list(a.shape)} and {list(b.shape)}")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise InputError(f"pictures must be floating-point values from 0 to 1, not {a.dtype} and {b.dtype}")
    return a.detach().double(), b.detach().to(a.device).double()


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each picture, [N]."""
    return -10 * (a - b).square().mean(dim=(1, 2, 3)).log10()


def _similarities(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity of each picture, [N]: one at a time, as each takes ten times its bytes."""
    height, width = a.shape[-2:]
    if min(height, width) < WINDOW:
        raise InputError(
            f"pictures of {width} × {height} pixels are too small for SSIM, which needs {WINDOW} × {WINDOW}",
            height=height, width=width,
        )  # fmt: skip
    return torch.stack([_similarity(one[None], other[None]) for one, other in zip(a, b, strict=True)])


def _similarity(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity of one picture [1, C, H, W]."""
    mean_a, mean_b = _smoothed(a), _smoothed(b)
    variance_a, variance_b = _smoothed(a * a) - mean_a.square(), _smoothed(b * b) - mean_b.square()
    covariance = _smoothed(a * b) - mean_a * mean_b
    brightness = (2 * mean_a * mean_b + K1**2) / (mean_a.square() + mean_b.square() + K1**2)
    structure = (2 * covariance + K2**2) / (variance_a + variance_b + K2**2)
    return (brightness * structure).mean()


def _smoothed(pictures: Tensor) -> Tensor:
    """Return Gaussian means around each pixel that is far enough from the edges, [N, C, H - 10, W - 10]."""
    places = torch.arange(WINDOW, dtype=pictures.dtype, device=pictures.device) - WINDOW // 2
    weights = (-(places / SIGMA).square() / 2).exp()
    weights = weights / weights.sum()
    count, channels, height, width = pictures.shape
    flat = pictures.reshape(count * channels, 1, height, width)
    smooth = conv2d(conv2d(flat, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return smooth.view(count, channels, *smooth.shape[-2:])
