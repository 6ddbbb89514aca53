"""Older transformers for clips: CogVideoX and ConsisID, Mochi, Allegro, Latte, EasyAnimate."""

from functools import partial
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # diffusers itself asks for OpenCV

from more_pipelines import _size
from pipeline_classes.clips_shared import CLIP_SIZE, frames, recipe, tokenizer_of
from tiny_pipelines import (
    FRAMES,
    LATENT_PIXELS,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _cogvideox,
    _image_vae,
    _picture,
    _t5,
    _vae_stages,
    heads,
)

FACE_WIDTH = 16
MOCHI_FRAMES = 7
ALLEGRO_FRAMES = 12


def _consisid(scale: int = 1) -> Parts:
    size: Parts = {"time_embed_dim": 8, "num_layers": 4, "sample_frames": FRAMES, "max_text_seq_length": TEXT_TOKENS}
    transformer = diffusers.ConsisIDTransformer3DModel(
        **heads(scale),
        **size,
        in_channels=8,
        out_channels=4,
        text_embed_dim=scale * T5_WIDTH,
        sample_width=LATENT_PIXELS,
        sample_height=LATENT_PIXELS,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=2,
        cross_attn_dim_head=16,
        cross_attn_num_heads=2 * scale,
        LFE_id_dim=FACE_WIDTH,
        LFE_vit_dim=FACE_WIDTH,
        LFE_depth=5,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=4,
        LFE_output_dim=scale * TRANSFORMER_WIDTH * 2 // 3,
    )
    return {**_cogvideox(scale), "transformer": transformer}


def _face(height: int) -> Parts:
    """A picture, and what five layers of a network for faces made of the face in it."""
    noise = torch.Generator().manual_seed(3)
    views = [torch.randn(1, 9, FACE_WIDTH, generator=noise) for _ in range(5)]
    return {**_picture(height), "id_vit_hidden": views, "id_cond": torch.randn(1, FACE_WIDTH, generator=noise)}


def _mochi(scale: int = 1) -> Parts:
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 4 + (True,),
    )
    transformer = diffusers.MochiTransformer3DModel(
        **heads(scale),
        num_layers=3,
        pooled_projection_dim=scale * 16,
        text_embed_dim=scale * T5_WIDTH,
        time_embed_dim=16,
        max_sequence_length=TEXT_TOKENS,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return {**_t5(scale), "vae": vae, "transformer": transformer, "scheduler": scheduler}


def _allegro(scale: int = 1) -> Parts:
    """Allegro, whose autoencoder works in tiles alone, of sizes that it writes down."""
    stages = _vae_stages("AllegroDownBlock3D", "AllegroUpBlock3D")
    vae = diffusers.AutoencoderKLAllegro(
        **stages,
        temporal_downsample_blocks=(True, True, False),
        temporal_upsample_blocks=(False, True, True),
        layers_per_block=1,
    )
    vae.use_tiling = True
    vae.kernel, vae.stride = (8, PIXELS // 2, PIXELS // 2), (4, PIXELS // 4, PIXELS // 4)
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2 * scale,
        attention_head_dim=24,
        num_layers=3,
        cross_attention_dim=scale * 48,
        sample_height=LATENT_PIXELS,
        sample_width=LATENT_PIXELS,
        sample_frames=3,
        caption_channels=scale * T5_WIDTH,
    )
    scheduler = diffusers.EulerAncestralDiscreteScheduler(beta_schedule="scaled_linear")
    return {**_t5(scale), "vae": vae, "transformer": transformer, "scheduler": scheduler}


def _latte(scale: int = 1) -> Parts:
    transformer = diffusers.LatteTransformer3DModel(
        **heads(scale),
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=scale * TRANSFORMER_WIDTH,
        caption_channels=scale * T5_WIDTH,
        attention_bias=True,
        sample_size=LATENT_PIXELS,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=4,
    )
    scheduler = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False)
    return {**_t5(scale), "vae": _image_vae(), "transformer": transformer, "scheduler": scheduler}


def _easyanimate(scale: int = 1, **settings: Any) -> Parts:
    tokenizer = tokenizer_of("Qwen2", "<|im_start|>", "<|im_end|>", first=("<|endoftext|>",))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision: Parts = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": scale * T5_WIDTH}
    config = transformers.Qwen2VLConfig(
        text_config={**_size(tokenizer, scale), "rope_parameters": rotary}, vision_config=vision
    )
    vae = diffusers.AutoencoderKLMagvit(
        latent_channels=4,
        block_out_channels=(8, 16, 16),
        down_block_types=("SpatialDownBlock3D", "SpatialTemporalDownBlock3D", "SpatialTemporalDownBlock3D"),
        up_block_types=("SpatialUpBlock3D", "SpatialTemporalUpBlock3D", "SpatialTemporalUpBlock3D"),
        layers_per_block=1,
        norm_num_groups=4,
    )
    transformer = diffusers.EasyAnimateTransformer3DModel(
        **heads(scale),
        **{"in_channels": 4, **settings},
        out_channels=4,
        patch_size=2,
        sample_width=LATENT_PIXELS,
        sample_height=LATENT_PIXELS,
        num_layers=3,
        mmdit_layers=2,
        time_embed_dim=8,
        add_norm_text_encoder=True,
        text_embed_dim=scale * T5_WIDTH,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2VLForConditionalGeneration(config),
        "vae": vae,
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    }


def _easyanimate_inpaint(scale: int = 1) -> Parts:
    return _easyanimate(scale, in_channels=3 * 4, resize_inpaint_mask_directly=False)


def _tensor(height: int, channels: int = 3) -> torch.Tensor:
    return torch.rand(1, channels, FRAMES, height, PIXELS, generator=torch.Generator().manual_seed(2))


def _repainted(height: int) -> Parts:
    mask = torch.zeros(1, 1, FRAMES, height, PIXELS)
    mask[..., height // 4 : 3 * height // 4, PIXELS // 4 : 3 * PIXELS // 4] = 255
    return {"video": _tensor(height), "mask_video": mask}


T5_CLIP: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}

CASES: tuple[TinyCase, ...] = (
    recipe(
        "CogVideoXFunControl",
        partial(_cogvideox, in_channels=8),
        frames("control_video"),
        height=PIXELS,
        width=PIXELS,
        max_sequence_length=TEXT_TOKENS,
    ),
    recipe("ConsisID", _consisid, _face, pipeline=ConsisIDPipeline, **T5_CLIP),
    recipe("Mochi", _mochi, **{**T5_CLIP, "num_frames": MOCHI_FRAMES}),
    recipe("Allegro", _allegro, **{**T5_CLIP, "num_frames": ALLEGRO_FRAMES}, clean_caption=False),
    recipe("Latte", _latte, height=PIXELS, width=PIXELS, video_length=4, clean_caption=False),
    recipe("EasyAnimate", _easyanimate, **CLIP_SIZE),
    recipe("EasyAnimateInpaint", _easyanimate_inpaint, _repainted, **CLIP_SIZE),
)

OPTIONAL_PARTS: dict[str, str] = {
    "EasyAnimateControlPipeline": "its call gives its own encode_prompt an argument that it does not take",
}
