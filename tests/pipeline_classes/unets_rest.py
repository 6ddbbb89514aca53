"""What is like nothing else: a shape's weights, two U-Nets in one, pictures and captions drawn together."""

import functools
from typing import Any

import diffusers
import transformers
from diffusers.pipelines.deprecated.unidiffuser import UniDiffuserModel, UniDiffuserTextDecoder
from diffusers.pipelines.deprecated.versatile_diffusion.modeling_text_unet import UNetFlatConditionModel
from diffusers.pipelines.shap_e.renderer import ShapERenderer

from more_pipelines import _vocab
from pipeline_classes.unets_parts import STEPS, prior_transformer, recipe, speak_zeros, unet_of_blocks, vision, without
from tiny_pipelines import (
    CLIP_WIDTH,
    LATENT_PIXELS,
    SQUARE,
    Parts,
    TinyCase,
    _clip,
    _image_vae,
    _picture,
)

HIDDEN = 16  # Of the shape's own network, four of whose layers are drawn.


def _shape(scale: int, embedding: int, tokens: int = 0) -> Parts:
    prior = prior_transformer(
        scale,
        embedding_dim=16,
        num_embeddings=4 * HIDDEN,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        embedding_proj_norm_type=None,
        encoder_hid_proj_type=None,
        added_emb_type=None,
        embedding_proj_dim=embedding,
        clip_embed_dim=32,
    )
    shapes = ((HIDDEN, 93), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN))
    renderer = ShapERenderer(param_shapes=shapes, d_latent=16, d_hidden=HIDDEN)
    scheduler = diffusers.HeunDiscreteScheduler(
        beta_schedule="exp", prediction_type="sample", use_karras_sigmas=True, clip_sample=True
    )
    return {"prior": prior, "scheduler": scheduler, "shap_e_renderer": renderer}


def _coarsely(pipe: Any, scale: int) -> None:
    """A few points a ray, where it would be 192."""
    pipe.shap_e_renderer.decode_to_image = functools.partial(
        pipe.shap_e_renderer.decode_to_image, ray_batch_size=1280, n_coarse_samples=8, n_fine_samples=8
    )


def _shape_of_text(scale: int = 1) -> Parts:
    return {**_shape(scale, scale * CLIP_WIDTH), **_clip(scale, projected=True)}


def _shape_of_picture(scale: int = 1) -> Parts:
    images = vision(scale, processor="image_processor")
    encoder = transformers.CLIPVisionModel(images["image_encoder"].config)
    return {**_shape(scale, scale * CLIP_WIDTH), **images, "image_encoder": encoder}


def _frames(height: int) -> Parts:
    return {"frame_size": height // 4}


def _framed_picture(height: int) -> Parts:
    return {**_picture(height), **_frames(height)}


def _gpt2(scale: int) -> Parts:
    tokenizer = transformers.GPT2Tokenizer(vocab=_vocab("<|endoftext|>", "\u0120"), merges=[])
    decoder = UniDiffuserTextDecoder(
        prefix_length=77,
        prefix_inner_dim=scale * CLIP_WIDTH,
        prefix_hidden_dim=scale * CLIP_WIDTH,
        vocab_size=len(tokenizer),
        n_positions=128,
        n_embd=scale * CLIP_WIDTH,
        n_layer=3,
        n_head=2,
    )
    return {"text_tokenizer": tokenizer, "text_decoder": decoder}


def _together(scale: int = 1) -> Parts:
    width = scale * CLIP_WIDTH
    unet = UniDiffuserModel(
        text_dim=width,
        clip_img_dim=width,
        num_attention_heads=4 * scale,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        sample_size=LATENT_PIXELS,
        patch_size=2,
        activation_fn="gelu",
        num_embeds_ada_norm=1000,
        norm_type="layer_norm",
        pre_layer_norm=False,
        use_timestep_embedding=False,
        use_data_type_embedding=True,
        norm_num_groups=8,
    )
    speak_zeros(unet)
    text = {f"clip_{name}" if name == "tokenizer" else name: part for name, part in _clip(scale).items()}
    scheduler = diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear")
    images = vision(scale, processor="clip_image_processor")
    return {**text, **images, **_gpt2(scale), "vae": _image_vae(), "unet": unet, "scheduler": scheduler}


def _flat(scale: int) -> UNetFlatConditionModel:
    """A U-Net of what has no height or width."""
    return UNetFlatConditionModel(
        sample_size=LATENT_PIXELS,
        down_block_types=("DownBlockFlat", "CrossAttnDownBlockFlat"),
        up_block_types=("CrossAttnUpBlockFlat", "UpBlockFlat"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=scale * CLIP_WIDTH,
        attention_head_dim=2 * scale,
    )


def _versatile(scale: int, *names: str) -> Parts:
    images = vision(scale, processor="image_feature_extractor")
    parts: Parts = {
        **_clip(scale, projected=True),
        **images,
        "image_unet": unet_of_blocks(scale, "DownBlock2D", "CrossAttnDownBlock2D"),
        "text_unet": _flat(scale),
        "vae": _image_vae(),
        "scheduler": diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
    }
    return without(parts, *names)


def _versatile_text(scale: int = 1) -> Parts:
    return _versatile(scale, "image_encoder", "image_feature_extractor")


def _versatile_image(scale: int = 1) -> Parts:
    return _versatile(scale, "text_encoder", "tokenizer", "text_unet")


NUMBERS: Parts = {**STEPS, "output_type": "np"}
TEXT: Parts = {**NUMBERS, "prompt": "a red fox"}


def _more(height: int) -> Parts:
    """Of one size each, which the model says."""
    return {"num_images_per_prompt": max(1, height // 32)}


CASES: tuple[TinyCase, ...] = (
    recipe("ShapE", _shape_of_text, _frames, common=TEXT, adapt=_coarsely),
    recipe("ShapEImg2Img", _shape_of_picture, _framed_picture, common=NUMBERS, adapt=_coarsely),
    recipe("UniDiffuser", _together, _more, common=TEXT),
    recipe("VersatileDiffusionTextToImage", _versatile_text, common=TEXT, **SQUARE),
    recipe("VersatileDiffusionImageVariation", _versatile_image, _picture, common=NUMBERS, **SQUARE),
)

BLIP = "its query transformer asks for invert_attention_mask, which transformers 5 has no longer"
OPTIONAL_PARTS: dict[str, str] = {
    "BlipDiffusionControlNetPipeline": BLIP,
    "BlipDiffusionPipeline": BLIP,
    "VersatileDiffusionDualGuidedPipeline": "its double attention refuses an argument that this U-Net gives to all",
    "VersatileDiffusionPipeline": "has no call of its own: its methods make the three other pipelines",
}
