"""Stable Diffusion XL with other inputs, and with networks beside its U-Net."""

from functools import partial
from typing import Any

import diffusers
from diffusers.modular_pipelines import StableDiffusionXLAutoBlocks

from pipeline_classes.unets_parts import joined, picture_as, recipe, speak_zeros, unet_of_blocks, without
from tiny_pipelines import (
    CLIP_WIDTH,
    HALFWAY,
    SQUARE,
    Parts,
    TinyCase,
    _masked_picture,
    _picture,
    _pictures,
    _stable_diffusion_xl,
)

SIZE_WIDTH = 8
HINT = (8, 8, 16)  # A control net that makes a picture as small as this autoencoder does.


def _xl_settings(scale: int, **settings: Any) -> Parts:
    return {
        "cross_attention_dim": scale * 2 * CLIP_WIDTH,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": SIZE_WIDTH,
        "projection_class_embeddings_input_dim": 6 * SIZE_WIDTH + scale * CLIP_WIDTH,
        "use_linear_projection": True,
        **settings,
    }


def _xl_of(*downs: str, layers: int = 1, **settings: Any) -> Any:
    """Stable Diffusion XL around a U-Net of these blocks."""

    def make(scale: int = 1) -> Parts:
        unet = unet_of_blocks(scale, *downs, layers=layers, **_xl_settings(scale, **settings))
        return {**_stable_diffusion_xl(scale), "unet": unet}

    return make


_with_channels = partial(_xl_of, "DownBlock2D", "CrossAttnDownBlock2D", transformer_layers_per_block=(1, 2))


def _controlled(scale: int = 1) -> Parts:
    base = _stable_diffusion_xl(scale)
    net = diffusers.ControlNetModel.from_unet(base["unet"], conditioning_embedding_out_channels=HINT)
    speak_zeros(net, std=0.2)
    return {**base, "controlnet": net}


def _union(scale: int = 1) -> Parts:
    """One control net for several kinds of pictures, whose own transformer mixes them."""
    base = _stable_diffusion_xl(scale)
    width = base["unet"].config.block_out_channels[0]
    net = diffusers.ControlNetUnionModel(
        **_xl_settings(scale),
        down_block_types=base["unet"].config.down_block_types,
        block_out_channels=base["unet"].config.block_out_channels,
        transformer_layers_per_block=(1, 2),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=2 * scale,
        conditioning_embedding_out_channels=HINT,
        num_control_type=4,
        num_trans_channel=width,
        num_trans_head=2,
        num_proj_channel=width,
    )
    speak_zeros(net, std=0.2)
    return {**base, "controlnet": net}


def _xs(scale: int = 1) -> Parts:
    base = _xl_of("DownBlock2D", "CrossAttnDownBlock2D", layers=2)(scale)
    net = diffusers.ControlNetXSAdapter.from_unet(base["unet"], 0.5, conditioning_embedding_out_channels=HINT)
    speak_zeros(net, std=0.2)
    return {**base, "controlnet": net}


def _adapter(scale: int = 1) -> Parts:
    adapter = diffusers.T2IAdapter(
        channels=[scale * 16, scale * 32, scale * 32, scale * 32],
        num_res_blocks=2,
        downscale_factor=8,
        adapter_type="full_adapter_xl",
    )
    parts = _xl_of("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", layers=2)(scale)
    return {
        **without(parts, "add_watermarker"),
        "adapter": adapter,
    }


def _frames(scale: int = 1) -> Parts:
    return {**_stable_diffusion_xl(scale), "scheduler": diffusers.DDIMScheduler(beta_schedule="scaled_linear")}


def _quiet(block: Any) -> None:
    """Without progress bars, of which each block has its own."""
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for inner in getattr(block, "sub_blocks", {}).values():
        _quiet(inner)


def _modular(**parts: Any) -> Any:
    blocks = StableDiffusionXLAutoBlocks()
    _quiet(blocks)
    pipe: Any = blocks.init_pipeline()
    pipe.update_components(**parts)
    return pipe


def _components(scale: int = 1) -> Parts:
    return without(_stable_diffusion_xl(scale), "add_watermarker")


PERTURBED: Parts = {"pag_scale": 2.0}
TWO_KINDS: Parts = {"control_mode": [0, 3]}
WARPED: Parts = {
    "num_inference_steps": 4,
    "t0": 1,
    "t1": 2,
    "motion_field_strength_x": 2,
    "motion_field_strength_y": 2,
    "output_type": "np",
}


def _two_kinds(height: int) -> Parts:
    return {"control_image": _pictures(2, height)}


CONTROLLED = joined(_picture, picture_as("control_image", 1))
CONTROLLED_MASK = joined(_masked_picture, picture_as("control_image", 1))

CASES: tuple[TinyCase, ...] = (
    recipe("StableDiffusionXLInpaint", _with_channels(in_channels=9), _masked_picture, **SQUARE),
    recipe("StableDiffusionXLInstructPix2Pix", _with_channels(in_channels=8), _picture, **SQUARE),
    recipe("StableDiffusionXLControlNet", _controlled, _picture, **SQUARE),
    recipe("StableDiffusionXLControlNetImg2Img", _controlled, CONTROLLED, **SQUARE, **HALFWAY),
    recipe("StableDiffusionXLControlNetInpaint", _controlled, CONTROLLED_MASK, **SQUARE),
    recipe("StableDiffusionXLControlNetUnion", _union, _two_kinds, **SQUARE, **TWO_KINDS),
    recipe(
        "StableDiffusionXLControlNetUnionImg2Img",
        _union,
        joined(_picture, _two_kinds),
        **SQUARE,
        **HALFWAY,
        **TWO_KINDS,
    ),
    recipe(
        "StableDiffusionXLControlNetUnionInpaint", _union, joined(_masked_picture, _two_kinds), **SQUARE, **TWO_KINDS
    ),
    recipe("StableDiffusionXLControlNetXS", _xs, _picture, **SQUARE),
    recipe("StableDiffusionXLAdapter", _adapter, _picture, **SQUARE),
    recipe("StableDiffusionXLPAG", _stable_diffusion_xl, **SQUARE, **PERTURBED),
    recipe("StableDiffusionXLPAGImg2Img", _stable_diffusion_xl, _picture, **HALFWAY, **PERTURBED),
    recipe("StableDiffusionXLPAGInpaint", _with_channels(in_channels=9), _masked_picture, **SQUARE, **PERTURBED),
    recipe("StableDiffusionXLControlNetPAG", _controlled, _picture, **SQUARE, **PERTURBED),
    recipe("StableDiffusionXLControlNetPAGImg2Img", _controlled, CONTROLLED, **SQUARE, **HALFWAY, **PERTURBED),
    recipe("TextToVideoZeroSDXL", _frames, **SQUARE, **WARPED, video_length=3),
    recipe("StableDiffusionXLModular", _components, pipeline=_modular, **SQUARE, output="images"),
)

OPTIONAL_PARTS: dict[str, str] = {
    "KolorsPipeline": "needs sentencepiece, which is not installed",
    "KolorsImg2ImgPipeline": "needs sentencepiece, which is not installed",
    "KolorsPAGPipeline": "needs sentencepiece, which is not installed",
}
