"""Kandinsky 5 and 6 for clips, and Motif."""

from functools import partial
from typing import Any

import diffusers
import transformers

from more_pipelines import _size
from pipeline_classes.clips_hunyuan import LATENTS, hunyuan_vae
from pipeline_classes.clips_shared import CLIP_SIZE, recipe, tokenizer_of
from tiny_pipelines import (
    CLIP_WIDTH,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _clip,
    _picture,
)

AXES = (4, 6, 6)


def _qwen(scale: int) -> Parts:
    """The language model of Kandinsky; its processor is used as a tokenizer."""
    tokenizer = tokenizer_of("Qwen2", "<|im_start|>", "<|im_end|>", first=("<|endoftext|>",))
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision: Parts = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_size(tokenizer, scale), "rope_parameters": rotary},
        vision_config={**vision, "out_hidden_size": scale * T5_WIDTH},
    )
    return {"tokenizer": tokenizer, "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config)}


def _kandinsky_5(scale: int = 1, **settings: Any) -> Parts:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=LATENTS,
        out_visual_dim=LATENTS,
        in_text_dim=scale * T5_WIDTH,
        in_text_dim2=scale * CLIP_WIDTH,
        time_dim=16,
        model_dim=scale * TRANSFORMER_WIDTH,
        ff_dim=scale * 64,
        num_text_blocks=1,
        num_visual_blocks=3,
        axes_dims=AXES,
        **settings,
    )
    return {
        **_qwen(scale),
        **_clip(scale, "_2"),
        "vae": hunyuan_vae(),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    }


KANDINSKY: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}
LONG: Parts = {**KANDINSKY, "num_frames": 17}  # The first four latent frames take after those that follow.
LENGTHS: Parts = {"prompt_template": "films: {}.", "prompt_template_encode_start_idx": 7}

CASES: tuple[TinyCase, ...] = (
    recipe("Kandinsky5T2V", partial(_kandinsky_5, visual_cond=True), attributes=LENGTHS, **KANDINSKY),
    recipe("Kandinsky5I2V", partial(_kandinsky_5, visual_cond=True), _picture, attributes=LENGTHS, **LONG),
)

OPTIONAL_PARTS: dict[str, str] = {}
