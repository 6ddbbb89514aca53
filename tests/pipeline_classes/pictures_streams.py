"""Recipes of denoisers in two streams and one, after Flux: HunyuanImage, LongCat, Ovis, PRX, Kandinsky 5."""

from typing import Any

import diffusers
import transformers
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from more_pipelines import SPACE, _size, _speak, _vocab
from pipeline_classes.pictures_parts import _case, _eightfold_vae
from pipeline_classes.pictures_readers import _processor, _qwen_2_vl, _qwen_3, _tokenizer
from tiny_pipelines import (
    CLIP_WIDTH,
    FLOW_VAE,
    PIXELS,
    SQUARE,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _clip,
    _image_vae,
    _picture,
    heads,
)


def _shifting() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def _hunyuan_image_transformer(scale: int, **settings: Any) -> Any:
    size: Parts = {"num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": scale * T5_WIDTH}
    return diffusers.HunyuanImageTransformer2DModel(**heads(scale), **size, **settings)


def _hunyuan_image(scale: int = 1) -> Parts:
    """HunyuanImage reads what the prompt quotes once more, letter by letter."""
    tokenizer = _tokenizer()
    width = scale * T5_WIDTH
    letters = transformers.T5Config(
        d_model=width, d_kv=scale * 8, d_ff=2 * width, num_layers=3, num_heads=2, feed_forward_proj="gated-gelu"
    )
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32),  # Its norms have 32 groups.
        layers_per_block=1,
        spatial_compression_ratio=4,
        sample_size=PIXELS // 2,
        scaling_factor=0.75,
    )
    letters.vocab_size = 384
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_2_vl(tokenizer, scale),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "text_encoder_2": transformers.T5EncoderModel(letters),
        "vae": vae,
        "transformer": _hunyuan_image_transformer(
            scale, in_channels=4, out_channels=4, text_embed_2_dim=width, rope_axes_dim=(8, 8)
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "guider": diffusers.AdaptiveProjectedMixGuidance(),
        "ocr_guider": diffusers.AdaptiveProjectedMixGuidance(guidance_scale=2.0),
    }


def _hunyuan_refiner(scale: int = 1) -> Parts:
    tokenizer = _tokenizer()
    vae = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_2_vl(tokenizer, scale),
        "vae": vae,
        "transformer": _hunyuan_image_transformer(
            scale, in_channels=16, out_channels=8, patch_size=(1, 1, 1), rope_axes_dim=(4, 4, 8)
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "guider": diffusers.AdaptiveProjectedMixGuidance(),
    }


def _streams(scale: int) -> Parts:
    size: Parts = {"in_channels": 16, "num_layers": 2, "num_single_layers": 3, "axes_dims_rope": (4, 4, 8)}
    return {**heads(scale), **size, "joint_attention_dim": scale * T5_WIDTH}


def _longcat(scale: int = 1, vae: Any = None) -> Parts:
    tokenizer = _tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_processor": _processor(tokenizer),
        "text_encoder": _qwen_2_vl(tokenizer, scale),
        "vae": vae or _image_vae(**FLOW_VAE, latent_channels=16),
        "transformer": diffusers.LongCatImageTransformer2DModel(
            **_streams(scale) | {"in_channels": 64}, pooled_projection_dim=scale * 16
        ),
        "scheduler": _shifting(),
    }


def _longcat_edit(scale: int = 1) -> Parts:
    """The class makes every picture a megapixel: an autoencoder that shrinks each side sixteen times."""
    stages = {"down_block_types": ("DownEncoderBlock2D",) * 5, "up_block_types": ("UpDecoderBlock2D",) * 5}
    channels = {"block_out_channels": (4, 4, 4, 8, 16), "norm_num_groups": 4}
    return _longcat(
        scale, diffusers.AutoencoderKL(**stages, **channels, **FLOW_VAE, sample_size=256, latent_channels=16)
    )


def _ovis(scale: int = 1) -> Parts:
    tokenizer = _tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_3(tokenizer, scale).model,
        "vae": _image_vae(**FLOW_VAE),
        "transformer": diffusers.OvisImageTransformer2DModel(**_streams(scale), out_channels=16),
        "scheduler": _shifting(),
    }


def _prx_size(scale: int) -> Parts:
    size: Parts = {"hidden_size": scale * TRANSFORMER_WIDTH, "num_heads": 2 * scale, "depth": 3, "axes_dim": [8, 8]}
    return {**size, "context_in_dim": scale * T5_WIDTH}


def _prx(scale: int = 1) -> Parts:
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[], model_max_length=TEXT_TOKENS
    )
    half = {**_size(tokenizer, scale), "head_dim": 16}
    config = transformers.T5GemmaConfig(encoder=half, decoder=half).encoder
    transformer = diffusers.PRXTransformer2DModel(in_channels=4, **_prx_size(scale))
    _speak(*(block.modulation for block in transformer.blocks))
    return {
        "tokenizer": tokenizer,
        "text_encoder": T5GemmaEncoder(config),
        "vae": _image_vae(**FLOW_VAE),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _prx_pixel(scale: int = 1) -> Parts:
    """PRX without an autoencoder: its patches are pixels."""
    tokenizer = _tokenizer()
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=3, patch_size=8, bottleneck_size=16, resolution_embeds=True, **_prx_size(scale)
    )
    _speak(*(block.modulation for block in transformer.blocks))
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen_3(tokenizer, scale).model,
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _kandinsky_5(scale: int = 1, **settings: Any) -> Parts:
    tokenizer = _tokenizer()
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=scale * T5_WIDTH,
        in_text_dim2=scale * CLIP_WIDTH,
        time_dim=scale * 16,
        model_dim=scale * TRANSFORMER_WIDTH,
        ff_dim=scale * 2 * TRANSFORMER_WIDTH,
        num_text_blocks=1,
        num_visual_blocks=3,
        axes_dims=(4, 4, 8),
        **settings,
    )
    _speak(*(module.out_layer for module in transformer.modules() if type(module).__name__ == "Kandinsky5Modulation"))
    return {
        "tokenizer": _processor(tokenizer),
        "text_encoder": _qwen_2_vl(tokenizer, scale),
        **_clip(scale, "_2"),
        "vae": _eightfold_vae(**FLOW_VAE),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _kandinsky_5_edit(scale: int = 1) -> Parts:
    return _kandinsky_5(scale, visual_cond=True)


SHORT: Parts = {"tokenizer_max_length": 32}
SIZES: Parts = {"resolutions": [(PIXELS, height) for height in (32, 64, 96, 128)]}
QUOTING: Parts = {**SQUARE, "prompt": 'a red fox says "hi"'}

CASES: tuple[TinyCase, ...] = (
    _case("HunyuanImage", _hunyuan_image, **QUOTING, attributes={**SHORT, "tokenizer_2_max_length": 16}),
    _case("HunyuanImageRefiner", _hunyuan_refiner, _picture, **SQUARE, attributes=SHORT),
    _case("LongCatImage", _longcat, **SQUARE, attributes=SHORT),
    _case("LongCatImageEdit", _longcat_edit, _picture, attributes=SHORT),
    _case("OvisImage", _ovis, **SQUARE, max_sequence_length=32),
    _case("PRX", _prx, **SQUARE, use_resolution_binning=False),
    _case("PRXPixel", _prx_pixel, **SQUARE, use_resolution_binning=False),
    _case("Kandinsky5T2I", _kandinsky_5, **SQUARE, max_sequence_length=32, attributes=SIZES),
    _case("Kandinsky5I2I", _kandinsky_5_edit, _picture, **SQUARE, attributes=SIZES),
)
OPTIONAL_PARTS: dict[str, str] = {}
