"""What other people's code does in a way that cannot be exported well, done otherwise in the copy that is exported."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["work_around"]


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
