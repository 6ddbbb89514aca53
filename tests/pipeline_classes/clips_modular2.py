"""Pipelines made of blocks that nothing else is made of: Wan Animate 2, MiniMax."""

import diffusers
import transformers

from more_pipelines import _size
from pipeline_classes.clips_modular import modular
from pipeline_classes.clips_shared import tokenizer_of
from tiny_pipelines import (
    FRAMES,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _picture,
    _pictures,
    _wan,
)

VIEW_WIDTH = 1280  # Written down by Wan Animate 2, as is the size of its view, 224.
WORDS = 168059  # Written down by MiniMax Music 3: its words, and after them what 16384 sounds are called.
LATENTS = 8


def _animate_2(scale: int = 1, guidance: float = 5.0) -> Parts:
    view = transformers.CLIPVisionConfig(
        hidden_size=VIEW_WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=224,
        patch_size=14,
    )
    transformer = diffusers.WanAnimate2Transformer3DModel(
        text_len=TEXT_TOKENS,
        dim=scale * TRANSFORMER_WIDTH,
        ffn_dim=scale * 64,
        freq_dim=16,
        text_dim=scale * T5_WIDTH,
        num_heads=2 * scale,
        num_layers=3,
    )
    vae = diffusers.AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1)  # The class divides by 8.
    return {
        **_wan(scale),
        "vae": vae,
        "image_encoder": transformers.CLIPVisionModel(view),
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=guidance),
    }


def _performance(height: int) -> Parts:
    return {**_picture(height), "driving_video": _pictures(2 * FRAMES - 1, height), "driving_video_fps": 24}


def _music(scale: int = 1) -> Parts:
    special = ("im_start", "im_end", "caption_start", "caption_end", "lyrics_start", "lyrics_end", "audio_start")
    tokenizer = tokenizer_of("Qwen2", *(f"<|{name}|>" for name in special), first=("<|endoftext|>",))
    width = scale * TRANSFORMER_WIDTH
    size = {**_size(tokenizer, scale), "vocab_size": WORDS, "hidden_size": width, "head_dim": 16}
    codebooks = 3
    return {
        "tokenizer": tokenizer,
        "language_model": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, tie_word_embeddings=True)),
        "rvq_depth_decoder": diffusers.MiniMaxMusic3RVQDepthDecoder(
            hidden_size=width,
            num_layers=2,
            num_attention_heads=2 * scale,
            intermediate_size=2 * width,
            audio_vocab_size=64,
            num_codebooks=codebooks,
        ),
        "condition_encoder": diffusers.MiniMaxMusic3ConditionEncoder(
            condition_hidden_dim=width,
            num_condition_layers=codebooks,
            out_dim=width,
            input_sampling_rate=800,
            input_hop_length=100,
            output_sampling_rate=1600,
            output_hop_length=32,
        ),
        "transformer": diffusers.MiniMaxMusic3Transformer1DModel(
            in_channels=LATENTS,
            condition_dim=width,
            num_layers=3,
            num_attention_heads=2 * scale,
            attention_head_dim=16,
            ff_inner_dim=2 * width,
            rotary_dim=8,
            fourier_embedding_dim=16,
        ),
        "vocoder": diffusers.MiniMaxMusic3Vocoder(
            latent_channels=LATENTS,
            decoder_input_dim=16,
            decoder_hidden_dim=16,
            upsampling_ratios=(4, 4, 2),
            sampling_rate=1600,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


ANIMATE: Parts = {"height": PIXELS, "width": PIXELS, "segment_frame_length": FRAMES, "max_sequence_length": TEXT_TOKENS}

CASES: tuple[TinyCase, ...] = (
    modular("WanAnimate2Modular", _animate_2, _performance, **ANIMATE),
    modular("WanAnimate2DistilledModular", _animate_2, _performance, **ANIMATE),
    modular(
        "MiniMaxMusic3Modular", _music, lambda height: {"audio_duration": height / PIXELS}, "audios", lyrics="fox fox"
    ),
)

OPTIONAL_PARTS: dict[str, str] = {}
