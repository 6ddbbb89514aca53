"""MiniMax H3: clip and sound in one sequence."""

from typing import Any

import diffusers
import transformers

from more_pipelines import _size
from pipeline_classes.clips_modular import modular
from pipeline_classes.clips_shared import tokenizer_of
from tiny_pipelines import PIXELS, T5_WIDTH, TRANSFORMER_WIDTH, Parts, TinyCase, heads

LATENTS = 8
RATE = 800
SHORTEST = 124  # Five seconds, which the class asks for.
LAYERS = 51  # It takes what the fiftieth layer of the language model says.


class Kinds:
    """Stands for the processor of pictures and clips, which needs torchvision: here there is text alone."""

    def create_mm_token_type_ids(self, batch: list[list[int]]) -> list[list[int]]:
        return [[0] * len(ids) for ids in batch]


def _language(scale: int) -> Parts:
    tokenizer = tokenizer_of("Qwen2", first=("<|endoftext|>",))
    rotary: Parts = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {**_size(tokenizer, scale), "num_hidden_layers": LAYERS, "head_dim": 16, "rope_parameters": rotary}
    vision: Parts = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 8}
    vision |= {"out_hidden_size": scale * T5_WIDTH, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return {"tokenizer": tokenizer, "text_encoder": transformers.Qwen3VLForConditionalGeneration(config)}


def _h3(scale: int = 1) -> Parts:
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=LATENTS,
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=(0.0,) * LATENTS,
        latents_std=(1.0,) * LATENTS,
    )
    audio_vae = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=8,
        encoder_rates=(4, 5),
        latent_dim=16,
        latent_channels=LATENTS,
        num_attention_heads=2,
        decoder_dim=32,
        decoder_rates=(5, 4),
        decoder_kernel_sizes=(9, 8),
        sampling_rate=RATE,
        latents_mean=[0.0] * LATENTS,
        latents_std=[1.0] * LATENTS,
    )
    transformer = diffusers.MiniMaxH3Transformer3DModel(
        **heads(scale),
        hidden_size=scale * TRANSFORMER_WIDTH,
        num_layers=3,
        num_refiner_layers=1,
        ffn_dim=scale * 64,
        in_channels=LATENTS,
        audio_in_channels=LATENTS,
        text_dim=scale * T5_WIDTH,
        freq_dim=16,
        time_embed_hidden_dim=32,
        time_embed_dim=32,
        rope_freq_dim=2,
    )
    return {
        **_language(scale),
        "processor": Kinds(),
        "vae": vae,
        "audio_vae": audio_vae,
        "transformer": transformer,
        "scheduler": diffusers.MiniMaxH3Scheduler(),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
    }


def _plain(case: TinyCase) -> TinyCase:
    """Guidance is in the weights: there is no negative prompt."""

    def call(height: int = PIXELS) -> Parts:
        return {name: value for name, value in case.call(height).items() if name != "negative_prompt"}

    return TinyCase(case.name, case.make, call)


SIZE: dict[str, Any] = {"height": PIXELS, "width": PIXELS, "num_frames": SHORTEST}

CASES: tuple[TinyCase, ...] = (_plain(modular("MiniMaxH3Modular", _h3, output=["videos", "audio"], **SIZE)),)

OPTIONAL_PARTS: dict[str, str] = {}
