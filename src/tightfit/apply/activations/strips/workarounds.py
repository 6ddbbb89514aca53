"""Workarounds for third-party code that cannot be exported well, or cannot run as it was exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["avg_pool3d", "work_around"]


def work_around(double: nn.Module) -> None:
    """Patch `double`, a private copy of a network; its results stay the same.

    diffusers 0.42 fills the causal mask of one video autoencoder's attention row by row, in a loop over all tokens: an
    operation or more for each of thousands of tokens. Here it is one comparison.
    """
    for part in double.modules():
        if hasattr(part, "prepare_causal_attention_mask"):
            object.__setattr__(part, "prepare_causal_attention_mask", _causal_mask)


def _causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> torch.Tensor:
    """Return the mask by which `n_hw` tokens of each frame attend to their own frame and those before."""
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    hidden = torch.where(frame[None, :] <= frame[:, None], 0.0, float("-inf")).to(dtype)
    return hidden if batch_size is None else hidden[None].expand(batch_size, -1, -1)


def avg_pool3d(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """aten.avg_pool3d, also for 16-bit floats on a CPU, for which torch 2.13 has no kernel.

    In one video autoencoder, diffusers 0.42 averages in float32 on the CPU; an exported program, which is for any
    device, does not.
    """
    pool = torch.ops.aten.avg_pool3d.default
    if x.device.type == "cpu" and x.dtype.itemsize == 2:
        return pool(x.float(), *args, **kwargs).to(x.dtype)  # type: ignore[no-any-return]
    return pool(x, *args, **kwargs)  # type: ignore[no-any-return]
