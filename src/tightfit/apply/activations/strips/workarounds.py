"""What other people's code does in a way that cannot be exported well, or not run as it was exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["avg_pool3d", "work_around"]


def work_around(double: nn.Module) -> None:
    """Changes `double`, a copy that nobody else sees; its numbers stay.

    diffusers 0.42 fills the causal mask of one video autoencoder's attention row by row, in a loop over all tokens:
    an operation or more for each of thousands of tokens. Here it is one comparison.
    """
    for part in double.modules():
        if hasattr(part, "prepare_causal_attention_mask"):
            object.__setattr__(part, "prepare_causal_attention_mask", _causal_mask)


def _causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> torch.Tensor:
    """The mask by which `n_hw` tokens of each frame see those of their own frame and of those before."""
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    hidden = torch.where(frame[None, :] <= frame[:, None], 0.0, float("-inf")).to(dtype)
    return hidden if batch_size is None else hidden[None].expand(batch_size, -1, -1)


def avg_pool3d(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """aten.avg_pool3d, also for halves on a CPU, for which torch 2.13 has no kernel.

    diffusers 0.42 knows that in one video autoencoder and averages in float32 there; what is exported, of no device in
    particular, does not.
    """
    pool = torch.ops.aten.avg_pool3d.default
    if x.device.type == "cpu" and x.dtype.itemsize == 2:
        return pool(x.float(), *args, **kwargs).to(x.dtype)  # type: ignore[no-any-return]
    return pool(x, *args, **kwargs)  # type: ignore[no-any-return]
