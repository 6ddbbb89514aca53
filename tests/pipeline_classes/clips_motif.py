"""Motif: clips from text and from a picture, which a text encoder sees too."""

import diffusers
import transformers

from more_pipelines import SPACE, _size, _vocab
from pipeline_classes.clips_shared import CLIP_SIZE, VIEW, recipe, siglip
from tiny_pipelines import CLIP_WIDTH, T5_WIDTH, TEXT_TOKENS, Parts, TinyCase, _picture, _wan, clip_size, heads

LATENTS = 16


def _motif(scale: int = 1) -> Parts:
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[]
    )
    vision = {name: value for name, value in clip_size(scale).items() if name != "projection_dim"}
    config = transformers.models.t5gemma2.T5Gemma2EncoderConfig(
        text_config={**_size(tokenizer, scale), "head_dim": 16, "dropout_rate": 0.0},
        vision_config={"model_type": "siglip_vision_model", **vision, "image_size": VIEW, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    transformer = diffusers.MotifVideoTransformer3DModel(
        **heads(scale),
        in_channels=2 * LATENTS + 1,
        out_channels=LATENTS,
        num_layers=2,
        num_single_layers=3,
        num_decoder_layers=1,
        text_embed_dim=scale * T5_WIDTH,
        image_embed_dim=scale * CLIP_WIDTH,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.models.t5gemma2.modeling_t5gemma2.T5Gemma2Encoder(config, eoi_token_index=1),
        "vae": _wan()["vae"],
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        "feature_extractor": siglip(1)["feature_extractor"],
    }


MOTIF: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}

CASES: tuple[TinyCase, ...] = (
    recipe("MotifVideo", _motif, **MOTIF),
    recipe("MotifVideoImage2Video", _motif, _picture, **MOTIF),
)

OPTIONAL_PARTS: dict[str, str] = {}
