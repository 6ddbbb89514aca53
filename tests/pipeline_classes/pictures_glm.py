"""The recipe of GLM-Image, where a language model writes a picture's plan before it is painted."""

from typing import Any

import diffusers
import transformers

from more_pipelines import _size, _vocab
from pipeline_classes.pictures_parts import _case, _eightfold_vae
from pipeline_classes.pictures_readers import CHAT, MARKS
from tiny_pipelines import PIXELS, SQUARE, T5_WIDTH, Parts, TinyCase, heads

PLANNED = 2 * PIXELS // 4  # pixels a side that one token of the plan stands for
WORDS = 32  # of plans


def _writer(scale: int) -> Parts:
    """The language model that writes plans, and its processor."""
    marks = {"image_token": "<|image|>", "grid_bos_token": "<|grid|>", "grid_eos_token": "<|/grid|>"}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=_vocab(*MARKS, *marks.values(), "<|plan|>", "\u0120", "\u010a", *".,:"),
        merges=[],
        bos_token="<|plan|>",
        extra_special_tokens=marks,
    )
    size = {"shortest_edge": PLANNED * PLANNED, "longest_edge": 16 * PIXELS * PIXELS}
    pictures = transformers.GlmImageImageProcessorPil(
        size=size, patch_size=PLANNED, merge_size=1, temporal_patch_size=1
    )
    chat = CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    text: Parts = {**_size(tokenizer, scale), "rope_parameters": rotary, "eos_token_id": None}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    config = transformers.GlmImageConfig(
        text_config={**text, "vision_vocab_size": WORDS + 2},
        vision_config={**vision, "patch_size": PLANNED, "image_size": 2 * PIXELS},
        vq_config={"embed_dim": 8, "num_embeddings": WORDS, "latent_channels": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=WORDS,
        image_end_token_id=WORDS + 1,
    )
    return {
        "processor": transformers.GlmImageProcessor(pictures, tokenizer, chat_template=chat),
        "vision_language_encoder": transformers.GlmImageForConditionalGeneration(config),
    }


def _glm_image(scale: int = 1) -> Parts:
    width = scale * T5_WIDTH
    size: Parts = {"d_model": width, "d_kv": scale * 8, "d_ff": 2 * width, "num_layers": 3, "num_heads": 2}
    letters: Any = transformers.T5Config(**size, vocab_size=384, feed_forward_proj="gated-gelu")
    transformer = diffusers.GlmImageTransformer2DModel(
        **heads(scale),
        in_channels=4,
        out_channels=4,
        num_layers=3,
        text_embed_dim=width,
        time_embed_dim=scale * 16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=WORDS + 2,
    )
    return {
        **_writer(scale),
        "tokenizer": transformers.ByT5Tokenizer(),
        "text_encoder": transformers.T5EncoderModel(letters),
        "vae": _eightfold_vae(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    }


# Of pictures to change, this diffusers asks transformers in a way that it does not know any more.
QUOTING: Parts = {**SQUARE, "prompt": 'a red fox says "hi"', "max_sequence_length": 32}

CASES: tuple[TinyCase, ...] = (_case("GlmImage", _glm_image, **QUOTING),)
OPTIONAL_PARTS: dict[str, str] = {}
