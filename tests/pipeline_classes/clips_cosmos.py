"""Cosmos: worlds from text, pictures, clips and control clips."""

from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import numpy as np
import transformers
from diffusers.video_processor import VideoProcessor

from more_pipelines import _size
from pipeline_classes.clips_shared import CLIP_SIZE, frames, recipe, tokenizer_of
from tiny_pipelines import (
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    Parts,
    TinyCase,
    _clip_of_pictures,
    _picture,
    _t5,
    _wan,
    heads,
)

LATENTS = 16
LAYERS = 3


class Lenient:
    """Stands for the guardrail, which is a package of its own: everything is safe."""

    def to(self, device: Any) -> "Lenient":
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


class _Exact(np.ndarray):
    """A clip that is not rounded down to 8 bits, where a number's last digit can make a whole step."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return self if dtype == np.uint8 else super().astype(dtype, *args, **kwargs)


class _ExactClips(VideoProcessor):
    def postprocess_video(self, video: Any, output_type: str = "np") -> Any:
        made = super().postprocess_video(video, output_type)
        return made.view(_Exact) if isinstance(made, np.ndarray) else made


def _exact(case: TinyCase) -> TinyCase:
    """The guardrail, and so the caller, gets what the autoencoder gave."""

    def make(scale: int = 1) -> Any:
        pipe: Any = case.make(scale)
        pipe.video_processor = _ExactClips(vae_scale_factor=pipe.vae_scale_factor_spatial)
        return pipe

    return replace(case, make=make)


def _model(scale: int, **settings: Any) -> Parts:
    """Without a mask of the padding, which diffusers resizes with torchvision."""
    size: Parts = {
        "num_layers": LAYERS,
        "mlp_ratio": 2.0,
        "concat_padding_mask": False,
        "adaln_lora_dim": 8,
        "max_size": (16, 32, 32),
    }
    size |= {"in_channels": LATENTS, "out_channels": LATENTS, "text_embed_dim": scale * T5_WIDTH}
    return {**heads(scale), **size, **settings}


def _cosmos(scale: int = 1, in_channels: int = LATENTS) -> Parts:
    vae = diffusers.AutoencoderKLCosmos(
        encoder_block_out_channels=(8, 8, 16, 16),
        decode_block_out_channels=(8, 16, 16, 16),
        attention_resolutions=(8,),
        resolution=PIXELS,
        num_layers=1,
        patch_size=2,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    transformer = diffusers.CosmosTransformer3DModel(**_model(scale, in_channels=in_channels))
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80, final_sigmas_type="sigma_min")
    return {**_t5(scale), "vae": vae, "transformer": transformer, "scheduler": scheduler, "safety_checker": Lenient()}


def _cosmos2(scale: int = 1, in_channels: int = LATENTS) -> Parts:
    return {
        **_t5(scale),
        "vae": _wan()["vae"],
        "transformer": diffusers.CosmosTransformer3DModel(
            **_model(scale, in_channels=in_channels, extra_pos_embed_type=None)
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        "safety_checker": Lenient(),
    }


def _cosmos2_5(scale: int = 1, **settings: Any) -> Parts:
    """Every layer of the language model's says something of the prompt."""
    tokenizer = tokenizer_of("Qwen2", "<|im_start|>", "<|im_end|>", first=("<|endoftext|>",))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_size(tokenizer, scale), "rope_parameters": rotary},
        vision_config={**vision, "out_hidden_size": scale * T5_WIDTH},
    )
    text: Parts = {
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 3 * scale * T5_WIDTH,
        "encoder_hidden_states_channels": scale * T5_WIDTH,
        "extra_pos_embed_type": None,
    }
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        "vae": _wan()["vae"],
        "transformer": diffusers.CosmosTransformer3DModel(**_model(scale, in_channels=LATENTS + 1, **text, **settings)),
        "scheduler": _wan()["scheduler"],
        "safety_checker": Lenient(),
    }


TEXT: Parts = {"max_sequence_length": TEXT_TOKENS}
WORLD: Parts = {**CLIP_SIZE, **TEXT}
LONG_TEXT: Parts = {"max_sequence_length": 5 * TEXT_TOKENS}

RECIPES = (
    recipe("CosmosTextToWorld", _cosmos, **WORLD),
    recipe("CosmosVideoToWorld", partial(_cosmos, in_channels=LATENTS + 1), _clip_of_pictures, **WORLD),
    recipe("Cosmos2TextToImage", _cosmos2, height=PIXELS, width=PIXELS, **TEXT),
    recipe("Cosmos2VideoToWorld", partial(_cosmos2, in_channels=LATENTS + 1), _picture, **WORLD),
    recipe("Cosmos2_5_PredictBase", _cosmos2_5, frames("video", 5), **CLIP_SIZE, **LONG_TEXT),
)
CASES: tuple[TinyCase, ...] = tuple(map(_exact, RECIPES))

OPTIONAL_PARTS: dict[str, str] = {
    "Cosmos2_5_TransferPipeline": "its control net always resizes a mask with torchvision, which is not installed",
}
