"""Recipes of pipelines that write texts by diffusion."""

from typing import Any

import diffusers
import transformers

from more_pipelines import _size
from pipeline_classes.pictures_parts import _case
from pipeline_classes.pictures_readers import _qwen_3, _tokenizer
from tiny_pipelines import Parts, TinyCase


def _llada(scale: int = 1) -> Parts:
    """LLaDA 2's own model comes with code from the hub; the pipeline takes any language model."""
    tokenizer = _tokenizer("<|mask|>")
    tokenizer.mask_token = "<|mask|>"
    return {
        "model": _qwen_3(tokenizer, scale),
        "tokenizer": tokenizer,
        "scheduler": diffusers.BlockRefinementScheduler(block_length=8),
    }


def _gemma(scale: int = 1) -> Parts:
    tokenizer = _tokenizer()
    size: Parts = {**_size(tokenizer, scale), "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 32}
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": scale * 16}
    vision: Any = transformers.Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        position_embedding_size=64,
    )
    config: Any = transformers.DiffusionGemmaConfig(
        text_config={**size, **experts, "layer_types": layers}, canvas_length=8, vision_config=vision
    )
    return {
        "model": transformers.DiffusionGemmaForBlockDiffusion(config),
        "processor": tokenizer,
        "scheduler": diffusers.DiscreteDDIMScheduler(),
    }


def _length(height: int) -> Parts:
    return {"gen_length": height // 4}


CASES: tuple[TinyCase, ...] = (
    _case("LLaDA2", _llada, _length, output_type="seq", num_inference_steps=4, temperature=1.0, eos_early_stop=False),
    _case("DiffusionGemma", _gemma, _length, output_type="seq", num_inference_steps=4, eos_early_stop=False),
)
OPTIONAL_PARTS: dict[str, str] = {}
