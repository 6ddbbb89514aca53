"""Stable Diffusion that edits: along directions in its latent space, or back through a picture's own noise."""

from typing import Any

import diffusers
import torch

from pipeline_classes.unets_parts import recipe, unet_of_blocks
from tiny_pipelines import PIXELS, SQUARE, Parts, TinyCase, _pictures, _stable_diffusion, _stable_diffusion_xl

EDITED: Parts = {"edit_guidance_scale": 5.0, "edit_warmup_steps": 0, "edit_threshold": 0.8}


def _solver(parts: Parts) -> Parts:
    """The parts with the scheduler that LEDITS++ inverts."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        algorithm_type="sde-dpmsolver++", solver_order=2, beta_schedule="scaled_linear"
    )
    return {**parts, "scheduler": scheduler}


def _ledits(scale: int = 1) -> Parts:
    """The U-Net attends where the picture is a quarter of its size, which is where LEDITS++ looks."""
    unet = unet_of_blocks(scale, "DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    return _solver({**_stable_diffusion(scale), "unet": unet})


def _ledits_xl(scale: int = 1) -> Parts:
    return _solver(_stable_diffusion_xl(scale))


def _invert(pipe: Any, scale: int) -> None:
    """The picture that is edited is given before the call."""
    noise = torch.Generator().manual_seed(1)
    pipe.invert(image=_pictures(1, PIXELS)[0], source_prompt="a hill", num_inversion_steps=2, skip=0.5, generator=noise)


def _edits(height: int) -> Parts:
    """The more, the larger the call."""
    return {"editing_prompt": ["a red fox", "a grey owl", "an old tree"][: height // 32]}


LEDITS: Parts = {"output_type": "pt", "negative_prompt": "blurry", **EDITED}

CASES: tuple[TinyCase, ...] = (
    recipe("SemanticStableDiffusion", _stable_diffusion, _edits, **SQUARE, **EDITED),
    recipe(
        "LEditsPPPipelineStableDiffusion",
        _ledits,
        _edits,
        pipeline="LEditsPPPipelineStableDiffusion",
        adapt=_invert,
        generator=False,
        common=LEDITS,
        use_cross_attn_mask=True,
    ),
    recipe(
        "LEditsPPPipelineStableDiffusionXL",
        _ledits_xl,
        _edits,
        pipeline="LEditsPPPipelineStableDiffusionXL",
        adapt=_invert,
        generator=False,
        common=LEDITS,
    ),
)

OPTIONAL_PARTS: dict[str, str] = {}
