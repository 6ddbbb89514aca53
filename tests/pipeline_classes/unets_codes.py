"""Models of a codebook's codes, and unCLIP: a picture from an embedding of it, made larger twice."""

from typing import Any

import diffusers
from diffusers.pipelines.deprecated.unclip.text_proj import UnCLIPTextProjModel
from diffusers.pipelines.deprecated.vq_diffusion.pipeline_vq_diffusion import LearnedClassifierFreeSamplingEmbeddings

from pipeline_classes.unets_parts import prior_transformer, recipe, speak_zeros, vision
from tiny_pipelines import (
    CLIP_WIDTH,
    HALFWAY,
    LATENT_PIXELS,
    SQUARE,
    Parts,
    TinyCase,
    _clip,
    _masked_picture,
    _picture,
)

CODES = 32


def _vqvae(width: int = 8, **settings: Any) -> diffusers.VQModel:
    return diffusers.VQModel(
        latent_channels=width,
        vq_embed_dim=width,
        num_vq_embeddings=CODES,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        norm_num_groups=4,
        **settings,
    )


def _amused(scale: int = 1) -> Parts:
    width = scale * 64
    transformer = diffusers.UVit2DModel(
        hidden_size=width,
        cond_embed_dim=scale * CLIP_WIDTH,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=5 * 8,
        encoder_hidden_size=scale * CLIP_WIDTH,
        vocab_size=CODES + 1,
        codebook_size=CODES,
        in_channels=width,
        block_out_channels=width,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=2 * width,
        sample_size=LATENT_PIXELS,
    )
    speak_zeros(transformer)
    return {
        **_clip(scale, projected=True),
        "vqvae": _vqvae(lookup_from_codebook=True),
        "transformer": transformer,
        "scheduler": diffusers.AmusedScheduler(mask_token_id=CODES),
    }


def _vq_diffusion(scale: int = 1) -> Parts:
    width = scale * CLIP_WIDTH
    transformer = diffusers.Transformer2DModel(
        num_attention_heads=4 * scale,
        attention_head_dim=16,
        num_layers=3,
        cross_attention_dim=width,
        sample_size=LATENT_PIXELS,
        num_vector_embeds=CODES + 1,
        num_embeds_ada_norm=100,
        norm_type="ada_norm",
        activation_fn="geglu-approximate",
        attention_bias=True,
        norm_num_groups=8,
    )
    learned = LearnedClassifierFreeSamplingEmbeddings(learnable=True, hidden_size=width, length=77)
    speak_zeros(learned, std=1.0)
    return {
        **_clip(scale),
        "vqvae": _vqvae(),
        "transformer": transformer,
        "learned_classifier_free_sampling_embeddings": learned,
        "scheduler": diffusers.VQDiffusionScheduler(num_vec_classes=CODES + 1),
    }


def _larger(scale: int) -> diffusers.UNet2DModel:
    return diffusers.UNet2DModel(
        sample_size=2 * LATENT_PIXELS,
        in_channels=6,
        out_channels=3,
        down_block_types=("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
        up_block_types=("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        add_attention=False,
        resnet_time_scale_shift="scale_shift",
    )


def _decoder(scale: int) -> Parts:
    width = scale * 32
    decoder = diffusers.UNet2DConditionModel(
        sample_size=LATENT_PIXELS,
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=width,
        class_embed_type="identity",
        resnet_time_scale_shift="scale_shift",
    )
    project = UnCLIPTextProjModel(
        clip_embeddings_dim=scale * CLIP_WIDTH, time_embed_dim=scale * 16 * 4, cross_attention_dim=width
    )
    speak_zeros(project, std=1.0)
    return {
        **_clip(scale, projected=True),
        "decoder": decoder,
        "text_proj": project,
        "super_res_first": _larger(scale),
        "super_res_last": _larger(scale),
        "decoder_scheduler": diffusers.UnCLIPScheduler(prediction_type="epsilon", variance_type="learned_range"),
        "super_res_scheduler": diffusers.UnCLIPScheduler(prediction_type="epsilon", variance_type="fixed_small_log"),
    }


def _unclip(scale: int = 1) -> Parts:
    scheduler = diffusers.UnCLIPScheduler(
        prediction_type="sample", variance_type="fixed_small_log", clip_sample_range=5.0
    )
    return {**_decoder(scale), "prior": prior_transformer(scale), "prior_scheduler": scheduler}


def _unclip_variation(scale: int = 1) -> Parts:
    return {**_decoder(scale), **vision(scale)}


def _more(height: int) -> Parts:
    """Of one size each, which their models say."""
    return {"num_images_per_prompt": max(1, height // 32)}


def _variations(height: int) -> Parts:
    return {**_picture(height), **_more(height)}


def _text(**settings: Any) -> Parts:
    return {"prompt": "a red fox", "output_type": "np", **settings}


LARGER: Parts = {"decoder_num_inference_steps": 2, "super_res_num_inference_steps": 2}

CASES: tuple[TinyCase, ...] = (
    recipe("UnCLIP", _unclip, _more, common=_text(**LARGER, prior_num_inference_steps=2)),
    recipe("UnCLIPImageVariation", _unclip_variation, _variations, common={**LARGER, "output_type": "np"}),
    recipe("Amused", _amused, **SQUARE),
    recipe("AmusedImg2Img", _amused, _picture, **HALFWAY),
    recipe("AmusedInpaint", _amused, _masked_picture, **HALFWAY),
    recipe("VQDiffusion", _vq_diffusion, _more, common=_text(num_inference_steps=2, truncation_rate=0.9)),
)

OPTIONAL_PARTS: dict[str, str] = {}
