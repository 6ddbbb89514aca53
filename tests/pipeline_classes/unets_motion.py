"""U-Nets of clips: a picture's with motion modules between its layers, or with layers through time of its own."""

from functools import partial
from typing import Any

import diffusers
import torch

from pipeline_classes.unets_parts import PROMPTS, STEPS, recipe, some_pictures, speak_zeros, vision, without
from tiny_pipelines import (
    CLIP_WIDTH,
    HALFWAY,
    LATENT_PIXELS,
    SQUARE,
    Parts,
    TinyCase,
    _clip,
    _image_vae,
    _picture,
    _stable_diffusion,
    _stable_diffusion_xl,
    _unet,
)

FRAMES = 4
CHECKED = ("safety_checker", "feature_extractor", "requires_safety_checker")
CHANNELS: Parts = {"layers_per_block": 1, "norm_num_groups": 8}


def _adapter(scale: int, **settings: Any) -> diffusers.MotionAdapter:
    adapter = diffusers.MotionAdapter(
        block_out_channels=(scale * 16, scale * 32),
        motion_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=8,
        motion_max_seq_length=16,
        **settings,
    )
    speak_zeros(adapter)
    return adapter


def _animated(scale: int = 1, **settings: Any) -> Parts:
    base = without(_stable_diffusion(scale), *CHECKED)
    scheduler = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False, steps_offset=1)
    return {**base, "scheduler": scheduler, "motion_adapter": _adapter(scale, **settings)}


def _animated_xl(scale: int = 1) -> Parts:
    base = without(_stable_diffusion_xl(scale), "add_watermarker")
    return {**base, "motion_adapter": _adapter(scale, use_motion_mid_block=False)}


def _controlled(scale: int = 1) -> Parts:
    base = _animated(scale)
    net = diffusers.ControlNetModel.from_unet(base["unet"], conditioning_embedding_out_channels=(8, 8, 16))
    speak_zeros(net, std=0.2)
    return {**base, "controlnet": net}


def _sparsely(scale: int = 1) -> Parts:
    """A control net that has motion modules too, and is told of some frames only.

    It reads pixels: told of latents, the pipeline would draw them with noise that no generator makes.
    """
    net = diffusers.SparseControlNetModel(
        **CHANNELS,
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
        block_out_channels=(scale * 16, scale * 32),
        cross_attention_dim=scale * CLIP_WIDTH,
        attention_head_dim=2 * scale,
        motion_num_attention_heads=2,
        motion_max_seq_length=16,
        conditioning_channels=3,
        use_simplified_condition_embedding=False,
        conditioning_embedding_out_channels=(8, 8, 16),
    )
    speak_zeros(net, std=0.2)
    return {**_animated(scale), "controlnet": net}


def _text(scale: int) -> Parts:
    scheduler = diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False)
    return {**_clip(scale), "vae": _image_vae(), "scheduler": scheduler}


def _through_time(scale: int = 1) -> Parts:
    unet = diffusers.UNet3DConditionModel(
        **CHANNELS,
        sample_size=LATENT_PIXELS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(scale * 16, scale * 32),
        cross_attention_dim=scale * CLIP_WIDTH,
        attention_head_dim=8,
    )
    speak_zeros(unet)
    return {**_text(scale), "unet": unet}


def _from_picture(scale: int = 1) -> Parts:
    unet = diffusers.I2VGenXLUNet(
        **CHANNELS,
        sample_size=LATENT_PIXELS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(scale * 16, scale * 32),
        cross_attention_dim=scale * CLIP_WIDTH,
        attention_head_dim=8,
        num_attention_heads=2 * scale,
    )
    speak_zeros(unet)
    return {**_text(scale), **vision(scale), "unet": unet}


def _video_diffusion(scale: int = 1) -> Parts:
    """The encoder sees pictures of 224 pixels, which is written into the pipeline."""
    unet = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=LATENT_PIXELS,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(scale * 32, scale * 32),
        layers_per_block=1,
        num_attention_heads=(2, 2),
        cross_attention_dim=scale * CLIP_WIDTH,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=3 * 8,
        num_frames=FRAMES,
    )
    vae = diffusers.AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * 3, block_out_channels=(32,) * 3, force_upcast=False
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_type="continuous",
        use_karras_sigmas=True,
        sigma_min=0.002,
        sigma_max=700.0,
    )
    return {**vision(scale, image_size=224, patch_size=32), "vae": vae, "unet": unet, "scheduler": scheduler}


def _zero(scale: int = 1) -> Parts:
    return {**_stable_diffusion(scale), "unet": _unet(scale, cross_attention_dim=scale * CLIP_WIDTH)}


def _drawn_picture(height: int) -> Parts:
    """The pipeline draws the picture's latents with torch's own generator, whatever it is given."""
    torch.manual_seed(1)
    return _picture(height)


def _frame_indices(height: int) -> Parts:
    return {**some_pictures("conditioning_frames", 2)(height), "controlnet_frame_indices": [0, FRAMES - 1]}


def _controlled_video(height: int) -> Parts:
    return {**some_pictures("video", FRAMES)(height), **some_pictures("conditioning_frames", FRAMES)(height)}


CLIP: Parts = {**SQUARE, "num_frames": FRAMES}
WARPED: Parts = {"num_inference_steps": 4, "t0": 1, "t1": 2, "motion_field_strength_x": 2, "motion_field_strength_y": 2}
CONDITIONS = some_pictures("conditioning_frames", FRAMES)
VIDEO = some_pictures("video", FRAMES)

CASES: tuple[TinyCase, ...] = (
    recipe("AnimateDiff", _animated, **CLIP),
    recipe("AnimateDiffPAG", _animated, **CLIP, pag_scale=2.0),
    recipe("AnimateDiffControlNet", _controlled, CONDITIONS, **CLIP),
    recipe("AnimateDiffSparseControlNet", _sparsely, _frame_indices, **CLIP),
    recipe("AnimateDiffVideoToVideo", _animated, VIDEO, **SQUARE, **HALFWAY),
    recipe("AnimateDiffVideoToVideoControlNet", _controlled, _controlled_video, **SQUARE, **HALFWAY),
    recipe("AnimateDiffSDXL", _animated_xl, **CLIP),
    recipe("PIA", partial(_animated, conv_in_channels=9), _picture, **CLIP),
    recipe("StableVideoDiffusion", _video_diffusion, _picture, common=STEPS, **CLIP, decode_chunk_size=2),
    recipe("I2VGenXL", _from_picture, _drawn_picture, **CLIP, clip_skip=None),
    recipe("TextToVideoSD", _through_time, **CLIP),
    recipe("VideoToVideoSD", _through_time, VIDEO, **HALFWAY, guidance_scale=5.0),
    recipe("TextToVideoZero", _zero, common={**PROMPTS, **WARPED, "output_type": "np"}, **SQUARE, video_length=3),
)

OPTIONAL_PARTS: dict[str, str] = {}
