"""Recipes of Flux 2 and of Z-Image: one stream for prompt and picture, language models to read."""

from functools import partial
from typing import Any

import diffusers
import torch
import transformers

from more_pipelines import _speak
from pipeline_classes.pictures_parts import _case, _control_picture
from pipeline_classes.pictures_readers import PATCH, _mistral_3, _qwen_3, _tokenizer
from tiny_pipelines import (
    FLOW_VAE,
    HALFWAY,
    PIXELS,
    SQUARE,
    T5_WIDTH,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _image_vae,
    _masked_picture,
    _picture,
    _pictures,
    _vae_stages,
    clip_size,
    heads,
)


def _flux_2_models(scale: int, **settings: Any) -> Parts:
    """Flux 2 reads three layers of a language model, side by side."""
    transformer = diffusers.Flux2Transformer2DModel(
        **heads(scale),
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=3 * scale * T5_WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        **settings,
    )
    stages = _vae_stages("DownEncoderBlock2D", "UpDecoderBlock2D")
    return {
        "vae": diffusers.AutoencoderKLFlux2(**stages, latent_channels=4, sample_size=PIXELS // 2),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def _flux_2(scale: int = 1) -> Parts:
    tokenizer = _tokenizer()
    return {**_flux_2_models(scale), "tokenizer": tokenizer, "text_encoder": _mistral_3(tokenizer, scale)}


def _flux_2_klein(scale: int = 1) -> Parts:
    tokenizer = _tokenizer()
    models = _flux_2_models(scale, guidance_embeds=False)
    return {**models, "tokenizer": tokenizer, "text_encoder": _qwen_3(tokenizer, scale)}


def _z_image(scale: int = 1, **settings: Any) -> Parts:
    tokenizer = _tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=scale * TRANSFORMER_WIDTH,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2 * scale,
        n_kv_heads=2 * scale,
        cap_feat_dim=scale * T5_WIDTH,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 32, 32],
        **settings,
    )
    for padding in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(padding, std=0.2)
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_3(tokenizer, scale).model,
        "vae": _image_vae(**FLOW_VAE),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _z_image_control(scale: int = 1, mask_channels: int = 0) -> Parts:
    base = _z_image(scale)
    net = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=4 + mask_channels,
        add_control_noise_refiner="control_noise_refiner",
        dim=scale * TRANSFORMER_WIDTH,
        n_refiner_layers=1,
        n_heads=2 * scale,
        n_kv_heads=2 * scale,
    )
    for block in (*net.control_layers, *net.control_noise_refiner):
        _speak(block.after_proj, *([block.before_proj] if hasattr(block, "before_proj") else []))
    return {**base, "controlnet": net}


def _z_image_omni(scale: int = 1) -> Parts:
    """Z-Image that is shown pictures, as latents and as what SigLIP sees in them."""
    size = clip_size(scale)
    width = size["hidden_size"]
    del size["projection_dim"]
    base = _z_image(scale, siglip_feat_dim=width)
    torch.nn.init.normal_(base["transformer"].siglip_pad_token, std=0.2)
    base["vae"].to(torch.bfloat16)  # The class makes its pictures bfloat16, whatever the autoencoder is.
    config = transformers.Siglip2VisionConfig(**size, patch_size=PATCH, num_patches=16)
    return {
        **base,
        "siglip": transformers.Siglip2VisionModel(config),
        "siglip_processor": transformers.Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=16),
    }


def _control_mask(height: int) -> Parts:
    return {**_masked_picture(height), **_control_picture(height)}


def _reference(height: int) -> Parts:
    """Flux 2 takes no pictures of less than 64 pixels a side."""
    return {"image": _pictures(1, max(height, PIXELS))}


def _flux_2_mask(height: int) -> Parts:
    return {**_masked_picture(height), "image_reference": _reference(height)["image"][0]}


FLUX_2: Parts = {**SQUARE, "max_sequence_length": 32, "text_encoder_out_layers": (1, 2, 3)}
Z_IMAGE: Parts = {**SQUARE, "max_sequence_length": 32}

CASES: tuple[TinyCase, ...] = (
    _case("Flux2", _flux_2, _reference, **FLUX_2),
    _case("Flux2Klein", _flux_2_klein, _reference, **FLUX_2),
    _case("Flux2KleinKV", _flux_2_klein, _reference, **FLUX_2),
    _case("Flux2KleinInpaint", _flux_2_klein, _flux_2_mask, **FLUX_2, **HALFWAY),
    _case("ZImage", _z_image, **Z_IMAGE),
    _case("ZImageControlNet", _z_image_control, _control_picture, **Z_IMAGE),
    _case("ZImageControlNetInpaint", partial(_z_image_control, mask_channels=1 + 4), _control_mask, **Z_IMAGE),
    _case("ZImageOmni", _z_image_omni, _reference, **Z_IMAGE),
    _case("ZImageImg2Img", _z_image, _picture, **Z_IMAGE, **HALFWAY),
    _case("ZImageInpaint", _z_image, _masked_picture, **Z_IMAGE, **HALFWAY),
)
OPTIONAL_PARTS: dict[str, str] = {}
