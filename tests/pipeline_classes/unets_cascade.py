"""Stable Cascade and Wuerstchen: a prior makes a very small picture, which a second model draws large."""

from typing import Any

import diffusers
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_diffnext import WuerstchenDiffNeXt
from diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_prior import WuerstchenPrior

from pipeline_classes.unets_parts import recipe, seeded, some_pictures, speak_zeros, vision
from tiny_pipelines import CLIP_WIDTH, PIXELS, SQUARE, Parts, TinyCase, _clip

SMALL = 16  # Channels of the very small picture.


def _vqgan() -> PaellaVQModel:
    vqgan = PaellaVQModel(bottleneck_blocks=2, embed_dim=16, num_vq_embeddings=32)
    speak_zeros(vqgan)
    return vqgan


def _cascade(scale: int, **settings: Any) -> diffusers.StableCascadeUNet:
    blocks = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
    unet = diffusers.StableCascadeUNet(
        conditioning_dim=scale * 32,
        block_out_channels=(scale * 64, scale * 64),
        num_attention_heads=(4, 4),
        down_num_layers_per_block=(1, 2),
        up_num_layers_per_block=(2, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(blocks, blocks),
        clip_text_pooled_in_channels=scale * CLIP_WIDTH,
        dropout=(0.0, 0.0),
        **settings,
    )
    speak_zeros(unet)
    return unet


def _cascade_prior_unet(scale: int) -> diffusers.StableCascadeUNet:
    width = scale * CLIP_WIDTH
    size: Parts = {"in_channels": SMALL, "out_channels": SMALL, "switch_level": (False,)}
    return _cascade(scale, **size, clip_text_in_channels=width, clip_image_in_channels=width)


def _cascade_decoder_unet(scale: int) -> diffusers.StableCascadeUNet:
    size: Parts = {"in_channels": 4, "out_channels": 4, "effnet_in_channels": SMALL, "pixel_mapper_in_channels": 3}
    return _cascade(scale, **size, timestep_conditioning_type=("sca",))


def _scheduler() -> diffusers.DDPMWuerstchenScheduler:
    return diffusers.DDPMWuerstchenScheduler()


def _cascade_prior(scale: int = 1) -> Parts:
    text = {**_clip(scale, projected=True), **vision(scale)}
    return {**text, "prior": _cascade_prior_unet(scale), "scheduler": _scheduler()}


def _cascade_decoder(scale: int = 1) -> Parts:
    text = _clip(scale, projected=True)
    return {**text, "decoder": _cascade_decoder_unet(scale), "scheduler": _scheduler(), "vqgan": _vqgan()}


def _cascade_both(scale: int = 1) -> Parts:
    prior = _cascade_prior(scale)
    first = {f"prior_{name}": part for name, part in prior.items() if name != "prior"}
    return {**_cascade_decoder(scale), **first, "prior_prior": prior["prior"]}


def _wuerstchen_prior(scale: int = 1) -> Parts:
    prior = WuerstchenPrior(c_in=SMALL, c=scale * 64, c_cond=scale * CLIP_WIDTH, depth=4, nhead=4)
    speak_zeros(prior)
    return {**_clip(scale), "prior": prior, "scheduler": _scheduler()}


def _wuerstchen(scale: int = 1) -> Parts:
    decoder = WuerstchenDiffNeXt(
        patch_size=1,
        c_cond=scale * 32,
        c_hidden=[scale * 32, scale * 64],
        nhead=[-1, 4],
        blocks=[1, 2],
        level_config=["CT", "CTA"],
        inject_effnet=[False, True],
        effnet_embd=SMALL,
        clip_embd=scale * CLIP_WIDTH,
    )
    speak_zeros(decoder)
    return {**_clip(scale), "decoder": decoder, "scheduler": _scheduler(), "vqgan": _vqgan()}


def _wuerstchen_alone(scale: int = 1) -> Parts:
    return {**_wuerstchen(scale), "latent_dim_scale": 8.0}


def _wuerstchen_both(scale: int = 1) -> Parts:
    prior = _wuerstchen_prior(scale)
    first = {f"prior_{name}": part for name, part in prior.items() if name != "prior"}
    return {**_wuerstchen(scale), **first, "prior_prior": prior["prior"]}


def _small_picture(height: int) -> Parts:
    """What becomes a picture 42.7 times as large."""
    return {"image_embeddings": seeded(1, SMALL, height // 32, PIXELS // 32)}


def _even(height: int) -> Parts:
    """The first picture is ten and two thirds as large as the very small one: it must have sides that halve."""
    small = max(1, 3 * (height // 32 - 1))
    return {"height": int(small * 42.67), "width": 2 * PIXELS}


LARGE: Parts = {"height": PIXELS, "width": 2 * PIXELS}
BOTH: Parts = {"prior_num_inference_steps": 2, "decoder_guidance_scale": 1.5}

CASES: tuple[TinyCase, ...] = (
    recipe("StableCascadePrior", _cascade_prior, some_pictures("images", 1), **LARGE),
    recipe("StableCascadeDecoder", _cascade_decoder, _small_picture, guidance_scale=1.5),
    recipe("StableCascadeCombined", _cascade_both, some_pictures("images", 1), **SQUARE, **BOTH),
    recipe("WuerstchenPrior", _wuerstchen_prior, **LARGE),
    recipe("WuerstchenDecoder", _wuerstchen_alone, _small_picture, guidance_scale=1.5),
    recipe("WuerstchenCombined", _wuerstchen_both, _even, **BOTH),
)

OPTIONAL_PARTS: dict[str, str] = {}
