"""More tiny diffusers pipelines, with what those of tiny_pipelines.py have not.

A network beside the denoiser, linear attention, language models as text encoders, experts that have nothing to do.
"""

import string
from dataclasses import replace
from typing import Any

import diffusers
import torch
import transformers

from tiny_pipelines import (
    FLOW_VAE,
    LATENT_PIXELS,
    SQUARE,
    T5_SQUARE,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _clip,
    _image_vae,
    _picture,
    _stable_diffusion,
    _t5,
    _tiny,
    heads,
)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _vocab(*tokens: str) -> dict[str, int]:
    """Every letter and digit, after `tokens`."""
    return {token: index for index, token in enumerate([*tokens, *string.ascii_letters, *string.digits])}


def _size(tokenizer: Any, scale: int) -> Parts:
    """A small language model of what `tokenizer` spells."""
    size: Parts = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    size |= {"vocab_size": len(tokenizer), "num_hidden_layers": 3}
    size |= {"hidden_size": scale * T5_WIDTH, "intermediate_size": scale * 2 * T5_WIDTH}
    return {**size, "num_attention_heads": 2 * scale, "num_key_value_heads": scale}


def _speak(*layers: torch.nn.Module) -> None:
    """Gives values to layers that begin with zeros, and would pass for absent."""
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)


def _controlnet(scale: int = 1) -> Parts:
    base = _stable_diffusion(scale)
    net = diffusers.ControlNetModel.from_unet(base["unet"], conditioning_embedding_out_channels=(8, 8, 16))
    _speak(*net.controlnet_down_blocks, net.controlnet_mid_block, net.controlnet_cond_embedding.conv_out)
    return {**base, "controlnet": net}


def _pixart_sigma(scale: int = 1) -> Parts:
    transformer = diffusers.PixArtTransformer2DModel(
        **heads(scale),
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=scale * TRANSFORMER_WIDTH,
        caption_channels=scale * T5_WIDTH,
        sample_size=LATENT_PIXELS,
        use_additional_conditions=False,
    )
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return {**_t5(scale), "vae": _image_vae(), "transformer": transformer, "scheduler": scheduler}


def _sana(scale: int = 1) -> Parts:
    """Sana: linear attention, convolutions between, a deep-compression autoencoder, and Gemma to read the prompt."""
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[]
    )
    stages: Parts = {}
    for half in ("encoder", "decoder"):
        stages |= {
            f"{half}_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            f"{half}_block_out_channels": (8, 16, 16),
            f"{half}_layers_per_block": (1, 1, 1),
            f"{half}_qkv_multiscales": ((), (), (5,)),
        }
    transformer = diffusers.SanaTransformer2DModel(
        **heads(scale),
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_cross_attention_heads=2 * scale,
        cross_attention_head_dim=TRANSFORMER_WIDTH // 2,
        cross_attention_dim=scale * TRANSFORMER_WIDTH,
        caption_channels=scale * T5_WIDTH,
        sample_size=LATENT_PIXELS,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Gemma2Model(transformers.Gemma2Config(**_size(tokenizer, scale), head_dim=16)),
        "vae": diffusers.AutoencoderDC(**stages, latent_channels=4, attention_head_dim=8, scaling_factor=0.41),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _qwen_image(scale: int = 1) -> Parts:
    """Qwen-Image, whose text encoder is a language model that can see, of which the pipeline uses one half."""
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=_vocab("<|endoftext|>", "<|im_start|>", "<|im_end|>", "\u0120", "\u010a", *".,:"), merges=[]
    )
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": scale * T5_WIDTH}
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_size(tokenizer, scale), "rope_parameters": rotary}, vision_config=vision
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        **heads(scale),
        in_channels=16,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=scale * T5_WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        "vae": vae,
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def _hidream(scale: int = 1) -> Parts:
    """HiDream: four text encoders, of the last one two layers' outputs, and experts that work when they are chosen."""
    tokenizer = transformers.LlamaTokenizer(
        vocab=_vocab("<unk>", "<s>", "</s>", SPACE), merges=[], model_max_length=TEXT_TOKENS, pad_token="</s>"
    )
    llama = transformers.LlamaConfig(**_size(tokenizer, scale), head_dim=16, attn_implementation="eager")
    transformer = diffusers.HiDreamImageTransformer2DModel(
        **heads(scale),
        patch_size=2,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        caption_channels=[scale * T5_WIDTH] * 2,
        text_emb_dim=scale * T5_WIDTH,
        num_routed_experts=9,
        num_activated_experts=1,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(LATENT_PIXELS, LATENT_PIXELS),
        llama_layers=[0, 2],
    )
    _speak(*(module.gate for module in transformer.modules() if hasattr(module, "gate") and hasattr(module, "experts")))
    return {
        **_clip(scale, projected=True),
        **_clip(scale, "_2", projected=True),
        **_t5(scale, "_3"),
        "tokenizer_4": tokenizer,
        "text_encoder_4": transformers.LlamaForCausalLM(llama),
        "vae": _image_vae(**FLOW_VAE),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _hidream_case() -> TinyCase:
    """HiDream scales every size to the number of pixels that its models were trained with."""
    case = _tiny("HiDreamImage", _hidream, **T5_SQUARE)

    def make(scale: int = 1) -> Any:
        pipe: Any = case.make(scale)
        pipe.default_sample_size = LATENT_PIXELS
        return pipe

    return replace(case, make=make)


MORE_CASES: tuple[TinyCase, ...] = (
    _tiny("StableDiffusionControlNet", _controlnet, _picture, **SQUARE),
    _tiny("PixArtSigma", _pixart_sigma, **T5_SQUARE, use_resolution_binning=False, clean_caption=False),
    _tiny("Sana", _sana, **T5_SQUARE, use_resolution_binning=False, complex_human_instruction=None),
    _tiny("QwenImage", _qwen_image, **SQUARE, true_cfg_scale=2.0),
    _hidream_case(),
)
