"""Recipes of picture families of one or two classes each: Bria, Ernie, Krea, Nucleus, Ideogram, DreamLite."""

from typing import Any

import diffusers
import transformers

from more_pipelines import _qwen_image, _size, _speak
from pipeline_classes.pictures_flux_2 import _flux_2_models
from pipeline_classes.pictures_parts import _case
from pipeline_classes.pictures_readers import _mistral_3, _processor, _qwen_3_vl, _tokenizer
from tiny_pipelines import (
    FLOW_VAE,
    PIXELS,
    SQUARE,
    T5_SQUARE,
    T5_WIDTH,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _image_vae,
    _picture,
    _t5,
    heads,
)


def _shifting() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def _streams(scale: int, **settings: Any) -> Parts:
    size: Parts = {"in_channels": 16, "num_layers": 2, "num_single_layers": 3, "axes_dims_rope": (4, 4, 8)}
    return {**heads(scale), **size, **settings}


def _bria(scale: int = 1) -> Parts:
    transformer = diffusers.BriaTransformer2DModel(**_streams(scale, joint_attention_dim=scale * T5_WIDTH))
    return {**_t5(scale), "vae": _image_vae(**FLOW_VAE), "transformer": transformer, "scheduler": _shifting()}


def _fibo(scale: int = 1) -> Parts:
    """Fibo hears each layer of a language model in a block of its own; its autoencoder works on patches of pixels."""
    tokenizer = _tokenizer()
    width = scale * T5_WIDTH
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=8,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    transformer = diffusers.BriaFiboTransformer2DModel(
        **_streams(scale, in_channels=8, joint_attention_dim=2 * width, text_encoder_dim=width)
    )
    config = transformers.SmolLM3Config(**_size(tokenizer, scale))
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.SmolLM3ForCausalLM(config),
        "vae": vae,
        "transformer": transformer,
        "scheduler": _shifting(),
    }


def _fibo_2(scale: int = 1) -> Parts:
    tokenizer = _tokenizer()
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=scale * TRANSFORMER_WIDTH,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=2 * scale,
        cap_feat_dim=3 * scale * T5_WIDTH,
        injection_layer_ids=(1, 3),
        perceiver_num_layers=1,
        min_num_gist_tokens=8,
        max_num_gist_tokens=16,
        gist_step=4,
        gist_min_text_len=16,
        gist_max_text_len=128,
        axes_dims=(4, 4, 8),
        axes_lens=(2048, 64, 64),
    )
    for layer in transformer.layers:
        if hasattr(layer, "cross_attn_gate"):
            layer.cross_attn_gate.data.fill_(0.5)
    return {
        **_flux_2_models(scale),
        "processor": _processor(tokenizer),
        "text_encoder": _qwen_3_vl(tokenizer, scale),
        "transformer": transformer,
    }


def _ernie(scale: int = 1) -> Parts:
    """Ernie lets another language model write the prompt anew."""
    tokenizer = _tokenizer()
    writer = _tokenizer()
    writer.model_max_length = 8
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=scale * TRANSFORMER_WIDTH,
        num_attention_heads=2 * scale,
        num_layers=3,
        ffn_hidden_size=scale * 2 * TRANSFORMER_WIDTH,
        in_channels=16,
        out_channels=16,
        text_in_dim=scale * T5_WIDTH,
        rope_axes_dim=(4, 4, 8),
    )
    _speak(transformer.adaLN_modulation, transformer.final_linear)
    config = transformers.Ministral3Config(**_size(writer, scale), head_dim=16)
    return {
        **_flux_2_models(scale),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "tokenizer": tokenizer,
        "text_encoder": _mistral_3(tokenizer, scale).model,
        "transformer": transformer,
        "pe": transformers.Ministral3ForCausalLM(config),
        "pe_tokenizer": writer,
    }


def _krea(scale: int = 1, taps: tuple[int, ...] = (1, 2, 3)) -> Parts:
    """Krea hears several layers of a language model at once."""
    tokenizer = _tokenizer()
    transformer = diffusers.Krea2Transformer2DModel(
        **heads(scale),
        in_channels=16,
        num_layers=3,
        num_key_value_heads=scale,
        intermediate_size=scale * 2 * TRANSFORMER_WIDTH,
        timestep_embed_dim=16,
        text_hidden_dim=scale * T5_WIDTH,
        num_text_layers=len(taps),
        text_num_attention_heads=2 * scale,
        text_num_key_value_heads=2 * scale,
        text_intermediate_size=scale * 2 * T5_WIDTH,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_3_vl(tokenizer, scale, layers=taps[-1]).model,
        "vae": _qwen_image()["vae"],
        "transformer": transformer,
        "scheduler": _shifting(),
        "text_encoder_select_layers": taps,
    }


def _nucleus(scale: int = 1) -> Parts:
    """Nucleus: experts that choose their tokens."""
    tokenizer = _tokenizer()
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        **heads(scale),
        in_channels=16,
        out_channels=4,
        num_layers=4,
        num_key_value_heads=scale,
        joint_attention_dim=scale * T5_WIDTH,
        axes_dims_rope=(4, 4, 8),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=scale * TRANSFORMER_WIDTH,
        capacity_factors=2.0,
        mlp_ratio=8.0,  # Dense layers have a multiple of 128 channels inside, or none.
    )
    # Experts begin with what the memory held before.
    _speak(*(module for module in transformer.modules() if type(module).__name__ == "SwiGLUExperts"))
    return {
        "processor": _processor(tokenizer),
        "text_encoder": _qwen_3_vl(tokenizer, scale),
        "vae": _qwen_image()["vae"],
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _ideogram_transformer(scale: int) -> Any:
    return diffusers.Ideogram4Transformer2DModel(
        **heads(scale),
        in_channels=16,
        num_layers=3,
        intermediate_size=scale * 2 * TRANSFORMER_WIDTH,
        adaln_dim=16,
        llm_features_dim=13 * scale * T5_WIDTH,
        mrope_section=(4, 2, 2),
    )


def _ideogram(scale: int = 1) -> Parts:
    """Ideogram reads thirteen of 36 layers, and has a denoiser of its own for what has no prompt."""
    tokenizer = _tokenizer()
    models = _flux_2_models(scale)
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_3_vl(tokenizer, scale, layers=36).model,
        "vae": models["vae"],
        "transformer": _ideogram_transformer(scale),
        "unconditional_transformer": _ideogram_transformer(scale),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def _dreamlite(scale: int = 1) -> Parts:
    """DreamLite: a U-Net of separable convolutions, and an autoencoder without a middle."""
    tokenizer = _tokenizer()
    unet = diffusers.DreamLiteUNetModel(
        sample_size=16,
        block_out_channels=(scale * 16, scale * 32, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=scale * T5_WIDTH,
        attention_head_dim=2 * scale,
    )
    stages = {f"{half}_block_out_channels": (8, 8, 8) for half in ("encoder", "decoder")}
    blocks = {f"num_{half}_blocks": (1, 1, 1) for half in ("encoder", "decoder")}
    return {
        "tokenizer": tokenizer,
        "processor": _processor(tokenizer),
        "text_encoder": _qwen_3_vl(tokenizer, scale),
        "vae": diffusers.AutoencoderTiny(**stages, **blocks),
        "unet": unet,
        "scheduler": _shifting(),
    }


SMALL: Parts = {
    "text_encoder_out_layers": ((1, 2, 3),) * 3,
    "default_sample_size": PIXELS // 4,
    "text_encoder_image_size": 32,
}

CASES: tuple[TinyCase, ...] = (
    _case("Bria", _bria, **T5_SQUARE),
    _case("BriaFibo", _fibo, **SQUARE),
    _case("BriaFiboEdit", _fibo, _picture, **SQUARE, prompt='{"edit_instruction": "a red fox"}'),
    _case("BriaFibo2", _fibo_2, _picture, **SQUARE, attributes=SMALL),
    _case("ErnieImage", _ernie, draws=True, **SQUARE),
    _case("Krea2", _krea, **SQUARE, max_sequence_length=32),
    _case("NucleusMoEImage", _nucleus, **SQUARE, return_index=-2),
    _case("Ideogram4", _ideogram, **SQUARE, guidance_scale=3.0, guidance_schedule=None, max_sequence_length=128),
    _case("DreamLite", _dreamlite, _picture, **SQUARE),
    _case("DreamLiteMobile", _dreamlite, _picture, **SQUARE),
)
OPTIONAL_PARTS: dict[str, str] = {}
