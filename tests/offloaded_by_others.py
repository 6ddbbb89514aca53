"""Offloading of a pipeline's U-Net by accelerate and diffusers, as their own switches do it on a card."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from diffusers.hooks import apply_group_offloading

HERE = torch.device("cpu")


def by_model(pipe: Any) -> None:
    _, hook = accelerate.cpu_offload_with_hook(pipe.unet, HERE)
    pipe._all_hooks = [hook]


def by_layer(pipe: Any) -> None:
    accelerate.cpu_offload(pipe.unet, HERE)


def by_group(pipe: Any) -> None:
    apply_group_offloading(pipe.unet, HERE, HERE, offload_type="leaf_level")


def by_blocks(pipe: Any) -> None:
    apply_group_offloading(pipe.unet, HERE, HERE, offload_type="block_level", num_blocks_per_group=1)
