"""Recipes of Qwen-Image in all its forms."""

from functools import partial
from typing import Any

import diffusers

from more_pipelines import _qwen_image, _speak
from pipeline_classes.pictures_parts import _again, _case, _control_picture, _steady
from pipeline_classes.pictures_readers import _processor, _qwen_2_vl, _qwen_3_vl, _tokenizer
from tiny_pipelines import (
    HALFWAY,
    PIXELS,
    SQUARE,
    T5_WIDTH,
    Parts,
    TinyCase,
    _masked_picture,
    _picture,
    _pictures,
    heads,
)

SIXTEENFOLD: Parts = {"base_dim": 2, "dim_mult": [1, 1, 2, 2, 4], "temperal_downsample": [False, True, True, True]}


def _qwen_edit(scale: int = 1, **settings: Any) -> Parts:
    """The language model sees the picture that is to be changed, which becomes 1024 pixels a side.

    The autoencoder shrinks it more than others do, so that it does not take seconds.
    """
    base = _qwen_image(scale)
    tokenizer = _tokenizer()
    return {
        **base,
        "vae": _steady(_again(base["vae"], **SIXTEENFOLD)),
        "tokenizer": tokenizer,
        "processor": _processor(tokenizer),
        "text_encoder": _qwen_2_vl(tokenizer, scale),
        "transformer": _again(base["transformer"], **settings),
    }


def _qwen_layered(scale: int = 1) -> Parts:
    """Layers are pictures of four channels, so what has four of them must not be latents."""
    base = _qwen_edit(scale, use_additional_t_cond=True, use_layer3d_rope=True, in_channels=32, out_channels=8)
    statistics = {"latents_mean": [0.0] * 8, "latents_std": [1.0] * 8}
    return {**base, "vae": _steady(_again(base["vae"], input_channels=4, z_dim=8, **statistics))}


def _qwen_control(scale: int = 1, mask_channels: int = 0) -> Parts:
    base = _qwen_image(scale)
    net = diffusers.QwenImageControlNetModel.from_transformer(
        base["transformer"],
        num_layers=2,
        attention_head_dim=heads()["attention_head_dim"],
        num_attention_heads=2 * scale,
        extra_condition_channels=mask_channels,
    )
    _speak(*net.controlnet_blocks, net.controlnet_x_embedder)
    return {**base, "controlnet": net}


def _qwen_21(scale: int = 1) -> Parts:
    """Qwen-Image 2.1: pixels in patches of sixteen, and the language model's words as the beginning of one stream."""
    tokenizer = _tokenizer()
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=8,
        dim_mult=[1, 1, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    )
    transformer = diffusers.QwenImage21Transformer2DModel(
        **heads(scale),
        in_channels=8,
        out_channels=8,
        num_layers=3,
        context_in_dim=scale * T5_WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "processor": _processor(tokenizer),
        "text_encoder": _qwen_3_vl(tokenizer, scale),
        "vae": vae,
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def _control_mask(height: int) -> Parts:
    inputs = _masked_picture(height)
    return {"control_image": inputs["image"], "control_mask": inputs["mask_image"]}


def _two_pictures(height: int) -> Parts:
    return {"image": _pictures(2, height)}


def _to_layers(height: int) -> Parts:
    return {"image": _picture(height)["image"].convert("RGBA"), "layers": 2}


QWEN: Parts = {**SQUARE, "true_cfg_scale": 2.0}

CASES: tuple[TinyCase, ...] = (
    _case("QwenImageImg2Img", _qwen_image, _picture, **QWEN, **HALFWAY),
    _case("QwenImageInpaint", _qwen_image, _masked_picture, **QWEN, **HALFWAY),
    _case("QwenImageControlNet", _qwen_control, _control_picture, **QWEN),
    _case("QwenImageControlNetInpaint", partial(_qwen_control, mask_channels=4), _control_mask, draws=True, **QWEN),
    _case("QwenImageEdit", _qwen_edit, _picture, **QWEN),
    _case("QwenImageEditInpaint", _qwen_edit, _masked_picture, **QWEN, **HALFWAY),
    _case("QwenImageEditPlus", partial(_qwen_edit, zero_cond_t=True), _two_pictures, **QWEN),
    _case("QwenImageLayered", _qwen_layered, _to_layers, true_cfg_scale=2.0),
    _case("QwenImage21", _qwen_21, _picture, **QWEN, output_resolution=PIXELS),
)
OPTIONAL_PARTS: dict[str, str] = {}
