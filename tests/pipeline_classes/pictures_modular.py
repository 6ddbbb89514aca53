"""Recipes of picture pipelines that are put together from blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch

from more_pipelines import _qwen_image
from pipeline_classes.pictures_families import _ernie, _ideogram, _krea
from pipeline_classes.pictures_flux import _kontext
from pipeline_classes.pictures_flux_2 import FLUX_2, Z_IMAGE, _flux_2, _flux_2_klein, _reference, _z_image
from pipeline_classes.pictures_parts import USUAL
from pipeline_classes.pictures_qwen import _qwen_21, _qwen_edit, _qwen_layered, _to_layers, _two_pictures
from pipeline_classes.pictures_readers import _processor, _qwen_3, _qwen_3_5, _qwen_3_vl, _tokenizer
from tiny_pipelines import (
    PIXELS,
    SQUARE,
    T5_SQUARE,
    T5_WIDTH,
    Parts,
    TinyCase,
    _flux,
    _no_picture,
    _picture,
    _stable_diffusion_3,
    _t5,
    heads,
)


def _quiet(blocks: Any) -> None:
    for block in blocks.sub_blocks.values():
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
        _quiet(block)


def _modular(
    pipeline: str,
    parts: Callable[[int], Parts],
    inputs: Callable[[int], Parts] = _no_picture,
    **settings: Any,
) -> TinyCase:
    """The case of a class whose blocks say what they are made of, and what they take; it gives its pictures only."""

    def made(scale: int = 1) -> Any:
        pipe = getattr(diffusers, f"{pipeline}Pipeline")()
        known = {*pipe.component_names, *pipe.config_component_names, *pipe._config_specs}
        pipe.update_components(**{name: part for name, part in parts(scale).items() if name in known})
        return pipe

    def make(scale: int = 1) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = made(scale)
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
        _quiet(pipe._blocks)
        return pipe

    def call(height: int = PIXELS) -> Parts:
        blocks = getattr(diffusers, getattr(diffusers, f"{pipeline}Pipeline").default_blocks_name)()
        usual = dict(zip(USUAL, ("a red fox", "blurry", 2, "pt", torch.Generator().manual_seed(1)), strict=True))
        size = {"height": height} if "height" in settings else {}
        asked = {**usual, **settings, **size, **inputs(height)}
        taken = {name: value for name, value in asked.items() if name in blocks.input_names or name not in USUAL}
        return {"output": "images", **taken}

    return TinyCase(pipeline, make, call)


def _krea_tapped(scale: int = 1) -> Parts:
    """These classes hear the layers of a model of 36."""
    return _krea(scale, tuple(range(2, 36, 3)))


def _anima(scale: int = 1) -> Parts:
    """Anima: a language model's words, in the order of T5's tokens, for a denoiser of videos."""
    tokenizer, base = _tokenizer(), _qwen_image()
    t5 = _t5()["tokenizer"]
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=scale * T5_WIDTH,
        target_dim=scale * T5_WIDTH,
        model_dim=scale * T5_WIDTH,
        num_layers=2,
        num_attention_heads=2 * scale,
        target_vocab_size=len(t5),
        min_sequence_length=32,
    )
    transformer = diffusers.CosmosTransformer3DModel(
        **heads(scale),
        in_channels=4,
        out_channels=4,
        num_layers=3,
        text_embed_dim=scale * T5_WIDTH,
        adaln_lora_dim=8,
        max_size=(4, 32, 32),
        extra_pos_embed_type=None,
        concat_padding_mask=False,  # It is made with torchvision.
    )
    return {
        "tokenizer": tokenizer,
        "t5_tokenizer": t5,
        "text_encoder": _qwen_3(tokenizer, scale).model,
        "text_conditioner": conditioner,
        "vae": base["vae"],
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _flux_3(scale: int = 1, *, flow_map: bool = False) -> Parts:
    """Flux 3, whose prompt a language model of its own writes anew."""
    tokenizer = _tokenizer()
    transformer = diffusers.Flux3Transformer2DModel(
        **heads(scale),
        in_channels=16,
        cond_in_channels=16,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=3 * scale * T5_WIDTH,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        flow_map=flow_map,
    )
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=PIXELS // 2,
    )
    return {
        "prompt_upsampler": _qwen_3_5(tokenizer, scale),
        "prompt_upsampler_processor": _processor(tokenizer),
        "text_encoder": _qwen_3_vl(tokenizer, scale),
        "tokenizer": _processor(tokenizer),
        "vae": vae,
        "transformer": transformer,
    }


FLUX_3: Parts = {**SQUARE, "text_encoder_out_layers": (1, 2, 3), "max_new_tokens": 8}

CASES: tuple[TinyCase, ...] = (
    _modular("StableDiffusion3Modular", _stable_diffusion_3, **T5_SQUARE),
    _modular("FluxModular", _flux, **T5_SQUARE),
    _modular("FluxKontextModular", _flux, _kontext, **T5_SQUARE),
    _modular("Flux2Modular", _flux_2, _reference, **FLUX_2),
    _modular("Flux2KleinModular", _flux_2_klein, _reference, **FLUX_2),
    _modular("Flux2KleinBaseModular", _flux_2_klein, _reference, **FLUX_2),
    _modular("ZImageModular", _z_image, **Z_IMAGE),
    _modular("QwenImageModular", _qwen_image, **SQUARE),
    _modular("QwenImageEditModular", _qwen_edit, _picture, **SQUARE),
    _modular("QwenImageEditPlusModular", partial(_qwen_edit, zero_cond_t=True), _two_pictures, **SQUARE),
    _modular("QwenImageLayeredModular", _qwen_layered, _to_layers),
    _modular("QwenImage21Modular", _qwen_21, _picture, **SQUARE, output_resolution=PIXELS),
    _modular("QwenImage21TurboModular", _qwen_21, _picture, **SQUARE, output_resolution=PIXELS),
    _modular("Krea2Modular", _krea_tapped, **SQUARE, max_sequence_length=32),
    _modular("Krea2TurboModular", _krea_tapped, **SQUARE, max_sequence_length=32),
    _modular("ErnieImageModular", _ernie, **SQUARE),
    _modular("Ideogram4Modular", _ideogram, **SQUARE, max_sequence_length=128, guidance_schedule=(3.0, 3.0)),
    _modular("AnimaModular", _anima, **SQUARE, max_sequence_length=32),
    _modular("Flux3Modular", _flux_3, _reference, **FLUX_3),
    _modular("Flux3DistilledModular", partial(_flux_3, flow_map=True), _reference, **FLUX_3),
)
OPTIONAL_PARTS: dict[str, str] = {}
