"""HunyuanVideo with language models that read the prompt, and HunyuanVideo 1.5."""

from functools import partial
from typing import Any

import diffusers
import transformers

from more_pipelines import _size
from pipeline_classes.clips_shared import CLIP_SIZE, VIEW, recipe, siglip, tokenizer_of
from tiny_pipelines import (
    CLIP_WIDTH,
    FRAMES,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    Parts,
    TinyCase,
    _clip,
    _picture,
    _vae_stages,
    clip_size,
    heads,
)

LATENTS = 4
PATCHES = (VIEW // 8) ** 2
AXES = (4, 6, 6)
HEADER = "<|end_header_id|>"
TEMPLATE: Parts = {"template": "films: {}.", "crop_start": 8}
# <s>, one header, and then what the picture says, which ends where the text begins that is kept
PICTURE_TEMPLATE: Parts = {
    "template": f"{HEADER}<image>{HEADER}{{}}{HEADER}tell",
    "crop_start": 4,
    "image_emb_start": 2,
    "image_emb_end": 2 + PATCHES,
    "image_emb_len": PATCHES,
}


def hunyuan_vae() -> diffusers.AutoencoderKLHunyuanVideo:
    stages = _vae_stages("HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D")
    return diffusers.AutoencoderKLHunyuanVideo(
        **stages, latent_channels=LATENTS, layers_per_block=1, spatial_compression_ratio=4
    )


def _llama_tokenizer() -> Any:
    return tokenizer_of("Llama", "<image>", HEADER, first=("<unk>", "<s>", "</s>", "<pad>"), pad_token="<pad>")


def _llama(scale: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**_size(_llama_tokenizer(), scale), head_dim=16)


def _hunyuan(scale: int = 1, model: str = "HunyuanVideo", **settings: Any) -> Parts:
    size: Parts = {"in_channels": LATENTS, "out_channels": LATENTS, "num_layers": 2, "num_single_layers": 3}
    transformer = getattr(diffusers, f"{model}Transformer3DModel")(
        **heads(scale),
        **{**size, **settings},
        num_refiner_layers=1,
        text_embed_dim=scale * T5_WIDTH,
        pooled_projection_dim=scale * CLIP_WIDTH,
        rope_axes_dim=AXES,
    )
    return {
        **_clip(scale, "_2"),
        "tokenizer": _llama_tokenizer(),
        "text_encoder": transformers.LlamaModel(_llama(scale)),
        "transformer": transformer,
        "vae": hunyuan_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }


def _seen(condition: str, channels: int, scale: int = 1) -> Parts:
    """The language model sees the picture too."""
    tokenizer = _llama_tokenizer()
    vision = transformers.CLIPVisionConfig(**clip_size(scale), image_size=VIEW, patch_size=8)
    config = transformers.LlavaConfig(
        text_config=_llama(scale),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    view = {"height": VIEW, "width": VIEW}
    return {
        **_hunyuan(scale, image_condition_type=condition, in_channels=channels),
        "text_encoder": transformers.LlavaForConditionalGeneration(config),
        "image_processor": transformers.CLIPImageProcessorPil(size={"shortest_edge": VIEW}, crop_size=view),
    }


def _framepack(scale: int = 1) -> Parts:
    settings: Parts = {"has_image_proj": True, "image_proj_dim": scale * CLIP_WIDTH, "has_clean_x_embedder": True}
    return {**_hunyuan(scale, "HunyuanVideoFramepack", **settings), **siglip(scale)}


def _byt5(scale: int) -> Parts:
    """Reads what stands in quotation marks, by bytes."""
    tokenizer = transformers.ByT5Tokenizer()
    width = scale * T5_WIDTH
    size: Parts = {"d_model": width, "d_kv": scale * 8, "d_ff": 2 * width, "num_layers": 3, "num_heads": 2}
    config = transformers.T5Config(**size, vocab_size=len(tokenizer), feed_forward_proj="gated-gelu")
    return {"tokenizer_2": tokenizer, "text_encoder_2": transformers.T5EncoderModel(config)}


def _hunyuan_15(scale: int = 1, task: str = "t2v") -> Parts:
    tokenizer = tokenizer_of("Qwen2", "<|im_start|>", "<|im_end|>", first=("<|endoftext|>",))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(text_config={**_size(tokenizer, scale), "rope_parameters": rotary})
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        **heads(scale),
        in_channels=2 * LATENTS + 1,
        out_channels=LATENTS,
        num_layers=3,
        num_refiner_layers=1,
        text_embed_dim=scale * T5_WIDTH,
        text_embed_2_dim=scale * T5_WIDTH,
        image_embed_dim=scale * CLIP_WIDTH,
        rope_axes_dim=AXES,
        target_size=PIXELS,
        task_type=task,
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=LATENTS, block_out_channels=(16, 16, 32), layers_per_block=1, spatial_compression_ratio=4
    )
    return {
        **_byt5(scale),
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLTextModel(config.text_config),
        "transformer": transformer,
        "vae": vae,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }


def _hunyuan_15_picture(scale: int = 1) -> Parts:
    return {**_hunyuan_15(scale, "i2v"), **siglip(scale)}


HUNYUAN: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS, "prompt_template": TEMPLATE, "true_cfg_scale": 2.0}
SEEN: Parts = {**HUNYUAN, "prompt_template": PICTURE_TEMPLATE}
LENGTHS: Parts = {
    "system_message": "films: ",
    "prompt_template_encode_start_idx": 7,
    "tokenizer_max_length": TEXT_TOKENS,
    "tokenizer_2_max_length": TEXT_TOKENS,
    "vision_num_semantic_tokens": PATCHES,
}
QUOTED = 'a red fox, "hello"'

CASES: tuple[TinyCase, ...] = (
    recipe("HunyuanVideo", _hunyuan, **HUNYUAN),
    recipe("HunyuanVideoImageToVideo", partial(_seen, "latent_concat", 2 * LATENTS + 1), _picture, **SEEN),
    recipe(
        "HunyuanVideoTokenReplace",
        partial(_seen, "token_replace", LATENTS),
        _picture,
        pipeline="HunyuanVideoImageToVideo",
        **SEEN,
    ),
    recipe("HunyuanSkyreelsImageToVideo", partial(_hunyuan, in_channels=2 * LATENTS), _picture, **HUNYUAN),
    recipe("HunyuanVideoFramepack", _framepack, _picture, **HUNYUAN, latent_window_size=2),
    recipe("HunyuanVideo15", _hunyuan_15, attributes=LENGTHS, **CLIP_SIZE, prompt=QUOTED),
    recipe(
        "HunyuanVideo15ImageToVideo",
        _hunyuan_15_picture,
        _picture,
        attributes=LENGTHS,
        num_frames=FRAMES,
        prompt=QUOTED,
    ),
)

OPTIONAL_PARTS: dict[str, str] = {}
