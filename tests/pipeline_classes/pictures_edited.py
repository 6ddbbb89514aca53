"""Recipes of classes that change pictures of sizes of their own: VisualCloze, JoyImage."""

from functools import partial
from typing import Any

import diffusers

from pipeline_classes.pictures_flux import FILL, _flux_with
from pipeline_classes.pictures_parts import _case, _steady
from pipeline_classes.pictures_readers import _processor, _qwen_3_vl, _tokenizer
from tiny_pipelines import (
    PIXELS,
    SQUARE,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _picture,
    _pictures,
)


def _visual_cloze(scale: int = 1) -> Parts:
    return {**_flux_with(scale, **FILL), "resolution": PIXELS // 2}


def _joy(scale: int = 1, transformer: str = "JoyImageEditTransformer3DModel") -> Parts:
    """The class makes every picture a megapixel: an autoencoder that shrinks each side sixteen times."""
    tokenizer = _tokenizer()
    vae = diffusers.AutoencoderKLWan(
        base_dim=2,
        z_dim=4,
        dim_mult=[1, 1, 2, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_spatial=16,
    )
    denoiser: Any = getattr(diffusers, transformer)(
        in_channels=4,
        hidden_size=scale * TRANSFORMER_WIDTH,
        num_attention_heads=2 * scale,
        text_dim=scale * T5_WIDTH,
        num_layers=3,
        rope_dim_list=[4, 4, 8],
    )
    return {
        "tokenizer": tokenizer,
        "processor": _processor(tokenizer),
        "text_encoder": _qwen_3_vl(tokenizer, scale),
        "vae": _steady(vae),
        "transformer": denoiser,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _analogy(height: int) -> Parts:
    """Pairs of pictures, of the last of which one half is to be found: what is larger has more of them."""
    pictures = _pictures(height // 16, PIXELS)
    pairs = [[before, after] for before, after in zip(pictures[::2], pictures[1::2], strict=True)]
    pairs[-1][1] = None
    return {"image": pairs, "task_prompt": "make it red", "content_prompt": "a red fox"}


def _analogy_enlarged(height: int) -> Parts:
    return {**_analogy(PIXELS), "upsampling_height": height, "upsampling_width": PIXELS, "upsampling_strength": 0.5}


def _references(height: int) -> Parts:
    return {"images": _pictures(1, height)}


CLOZE: Parts = {"max_sequence_length": TEXT_TOKENS, "num_inference_steps": 4}

CASES: tuple[TinyCase, ...] = (
    _case("VisualClozeGeneration", _visual_cloze, _analogy, **CLOZE),
    _case("VisualCloze", _visual_cloze, _analogy_enlarged, **CLOZE),
    _case("JoyImageEdit", _joy, _picture, draws=True, **SQUARE),
    _case("JoyImageEditPlus", partial(_joy, transformer="JoyImageEditPlusTransformer3DModel"), _references, **SQUARE),
)
OPTIONAL_PARTS: dict[str, str] = {
    "OmniGenPipeline": "Its processor of pictures needs torchvision, which is not installed.",
}
