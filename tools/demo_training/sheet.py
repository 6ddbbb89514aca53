"""A sheet of prompts and what the demo model makes of them, for the README. Not picked: seeds 0, 1, 2, …"""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from matplotlib.figure import Figure

from demo_training.scores import GUIDANCE, STEPS
from tightfit.files import replacing

PROMPTS = (
    "a large red circle on the left and a small blue square on the right",
    "a large green triangle at the top",
    "a green triangle at the top and a red circle at the bottom",
    "a yellow diamond on the left and a purple circle at the top on a gray background",
    "a small orange square in the center on a black background",
    "a large blue diamond on the right and a large orange circle on the left on a pink background",
    "a purple triangle at the bottom and a small yellow square at the top on a black background",
    "a red square on the right on a pink background",
)


def draw_sheet(pipe: StableDiffusionPipeline, path: Path) -> None:
    """Writes a PNG of two rows of pictures, each under its prompt's words."""
    figure = Figure(figsize=(10.4, 6.6), dpi=110, facecolor="white")
    axes = figure.subplots(2, 4)
    for seed, (prompt, axis) in enumerate(zip(PROMPTS, axes.flat, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        picture = pipe(prompt, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=generator).images[0]
        axis.imshow(picture, interpolation="nearest")
        axis.set_title("\n".join(textwrap.wrap(prompt, 34)), fontsize=8, color="#333333")
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_color("#cccccc")
    figure.tight_layout(h_pad=1.6)
    with replacing(path) as partial:
        figure.savefig(partial, format=path.suffix.removeprefix("."))
