"""Sana for clips: from text, from a picture, and along the way of a camera."""

import diffusers
import numpy as np

from more_pipelines import _sana
from pipeline_classes.clips_ltx2 import LATENTS, ltx2_vae
from pipeline_classes.clips_shared import recipe
from tiny_pipelines import (
    FRAMES,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _picture,
    _wan,
    heads,
)


def _sana_video(scale: int = 1) -> Parts:
    transformer = diffusers.SanaVideoTransformer3DModel(
        **heads(scale),
        num_layers=3,
        num_cross_attention_heads=2 * scale,
        cross_attention_head_dim=TRANSFORMER_WIDTH // 2,
        cross_attention_dim=scale * TRANSFORMER_WIDTH,
        caption_channels=scale * T5_WIDTH,
        sample_size=PIXELS // 4,
        rope_max_seq_len=32,
    )
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return {**_sana(scale), "vae": _wan()["vae"], "transformer": transformer, "scheduler": scheduler}


def _sana_picture(scale: int = 1) -> Parts:
    return {**_sana_video(scale), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)}


def _sana_world(scale: int = 1) -> Parts:
    transformer = diffusers.SanaWMTransformer3DModel(
        in_channels=LATENTS,
        num_layers=4,
        hidden_size=scale * TRANSFORMER_WIDTH,
        num_attention_heads=2 * scale,
        linear_head_dim=TRANSFORMER_WIDTH // 2,
        caption_channels=scale * T5_WIDTH,
        chunk_plucker_channels=6 * 4,
        chunk_plucker_post_attn_blocks=2,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {**_sana(scale), "vae": ltx2_vae(), "transformer": transformer, "scheduler": scheduler}


def _walk(height: int) -> Parts:
    """A picture, and a camera that walks away from it."""
    camera = np.tile(np.eye(4, dtype=np.float32), (FRAMES, 1, 1))
    camera[:, 2, 3] = np.linspace(0, 1, FRAMES)
    return {**_picture(height), "c2w": camera, "intrinsics": np.array([50.0, 50.0, PIXELS / 2, height / 2])}


SANA: Parts = {"height": PIXELS, "width": PIXELS, "max_sequence_length": TEXT_TOKENS}
PLAIN: Parts = {"frames": FRAMES, "use_resolution_binning": False, "complex_human_instruction": None}

CASES: tuple[TinyCase, ...] = (
    recipe("SanaVideo", _sana_video, **SANA, **PLAIN),
    recipe("SanaImageToVideo", _sana_picture, _picture, **SANA, **PLAIN),
    recipe("SanaWM", _sana_world, _walk, **SANA, num_frames=FRAMES, chi_prompt=["say: "]),
)

OPTIONAL_PARTS: dict[str, str] = {}
