"""DeepFloyd IF: a U-Net of pixels that reads T5, and others that make its picture larger."""

from typing import Any

import diffusers

from pipeline_classes.unets_parts import joined, picture_as, recipe
from tiny_pipelines import HALFWAY, PIXELS, T5_WIDTH, Parts, TinyCase, _masked_picture, _picture, _pictures, _t5

SIZE = PIXELS // 2


def _stage(scale: int = 1, **settings: Any) -> Parts:
    width = scale * T5_WIDTH
    unet = diffusers.UNet2DConditionModel(
        **{"in_channels": 3, **settings},
        out_channels=6,
        sample_size=SIZE,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        act_fn="gelu",
        resnet_time_scale_shift="scale_shift",
        cross_attention_dim=width,
        cross_attention_norm="group_norm",
        encoder_hid_dim=width,
        encoder_hid_dim_type="text_proj",
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
    )
    return {
        **_t5(scale),
        "unet": unet,
        "scheduler": _scheduler(variance_type="learned_range"),
        "safety_checker": None,
        "feature_extractor": None,
        "watermarker": None,
        "requires_safety_checker": False,
    }


def _scheduler(**settings: Any) -> diffusers.DDPMScheduler:
    thresholds = {"thresholding": True, "dynamic_thresholding_ratio": 0.95, "sample_max_value": 1.5}
    return diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", **thresholds, **settings)


def _larger(scale: int = 1) -> Parts:
    """With the small picture beside the noise, which has noise of its own."""
    parts = _stage(scale, in_channels=6, class_embed_type="timestep")
    return {**parts, "image_noising_scheduler": _scheduler()}


def _small_picture(height: int) -> Parts:
    return {"image": _pictures(1, height // 4)[0].resize((PIXELS // 4, height // 4))}


LARGER: Parts = {"clean_caption": False, "noise_level": 100}
ORIGINAL = joined(_small_picture, picture_as("original_image", 1))
ORIGINAL_MASK = joined(_masked_picture, ORIGINAL)

CASES: tuple[TinyCase, ...] = (
    recipe("IF", _stage, height=SIZE, width=SIZE, clean_caption=False),
    recipe("IFImg2Img", _stage, _picture, **HALFWAY, clean_caption=False),
    recipe("IFInpainting", _stage, _masked_picture, **HALFWAY, clean_caption=False),
    recipe("IFSuperResolution", _larger, _small_picture, height=SIZE, width=PIXELS, **LARGER),
    recipe("IFImg2ImgSuperResolution", _larger, ORIGINAL, **HALFWAY, **LARGER),
    recipe("IFInpaintingSuperResolution", _larger, ORIGINAL_MASK, **HALFWAY, **LARGER),
)

OPTIONAL_PARTS: dict[str, str] = {}
