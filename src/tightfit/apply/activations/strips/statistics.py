"""Group normalization of a map of which only some rows are available at a time.

Mean and variance of each strip are merged by the formula of Chan, Golub and LeVeque (1979) in float64: sums of squares
would lose all digits if the mean is large compared with the standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

__all__ = ["Statistics", "normalise"]


class Statistics:
    """Count, mean and sum of squared deviations of each group of channels, over the rows seen so far."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._count = 0
        self._mean: torch.Tensor | None = None  # (batch · groups), float64
        self._deviation: torch.Tensor | None = None
        self._dtype = torch.float32  # of the result

    def take(self, strip: torch.Tensor) -> None:
        """Add rows that were not seen before, (batch, channels, …)."""
        grouped = _wide(strip.reshape(strip.shape[0] * self._groups, -1))
        self._dtype = grouped.dtype
        mean, variance = _moments(grouped)
        count = grouped.shape[1]
        self._add(mean.double(), variance.double() * count, count)

    def _add(self, mean: torch.Tensor, deviation: torch.Tensor, count: int) -> None:
        if self._mean is None or self._deviation is None:
            self._mean, self._deviation, self._count = mean, deviation, count
            return
        total, apart = self._count + count, mean - self._mean
        self._deviation = self._deviation + deviation + apart * apart * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._count = total

    def packed(self) -> torch.Tensor:
        """Return mean and deviation of the rows seen so far, (2, batch · groups), float64."""
        assert self._mean is not None
        assert self._deviation is not None
        return torch.stack((self._mean, self._deviation))

    def merged(self, packs: Iterable[torch.Tensor], counts: Iterable[int]) -> Statistics:
        """Return the statistics of all rows of which `packs` are `packed`, in their order.

        `counts`: the elements of a group of channels that each pack is of.
        """
        found = Statistics(self._groups)
        found._dtype = self._dtype
        for (mean, deviation), count in zip(packs, counts, strict=True):
            found._add(mean, deviation, count)
        return found

    def known(self) -> torch.Tensor:
        """Return mean and variance of all rows, (2, batch · groups), in float32; for float64 rows in float64."""
        assert self._mean is not None
        assert self._deviation is not None
        return torch.stack((self._mean, self._deviation / self._count)).to(self._dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float32; float64 stays float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _moments(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of each row.

    On the CPU by a layer norm whose output is discarded: torch.var_mean takes six times as long.
    """
    if rows.device.type != "cpu":
        variance, mean = torch.var_mean(rows, dim=1, correction=0)
        return mean, variance
    _, mean, rstd = torch.native_layer_norm(rows, [rows.shape[1]], None, None, 0.0)
    return mean.flatten(), rstd.flatten().double().pow(-2)


def normalise(
    rows: torch.Tensor,
    known: torch.Tensor,
    groups: int,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize some rows of a map, (batch, channels, …), with the mean and variance `known` of all its rows.

    In half precision by the batch norm kernel, which takes a mean and a variance for each channel and computes in
    float32; otherwise in the rows' own precision.
    """
    batch, channels = rows.shape[:2]
    mean, variance = known.repeat_interleave(channels // groups, dim=1)
    scale, shift = (None if x is None else _wide(x).repeat(batch) for x in (weight, bias))
    flat = rows.reshape(1, batch * channels, *rows.shape[2:])
    if rows.dtype.itemsize < torch.float32.itemsize:
        done = F.batch_norm(flat, mean, variance, scale, shift, training=False, eps=eps)
        return done.reshape(rows.shape)
    slope = torch.rsqrt(variance + eps) * (1 if scale is None else scale)
    offset = (0 if shift is None else shift) - mean * slope
    each = (1, -1, *(1 for _ in rows.shape[2:]))
    return torch.addcmul(offset.reshape(each), flat, slope.reshape(each)).reshape(rows.shape)
