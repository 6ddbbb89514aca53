"""Wan and the families that took its parts: SkyReels-V2, Lucy Edit, ChronoEdit, AnyFlow, Helios."""

from functools import partial
from typing import Any

import diffusers
from PIL import Image

from pipeline_classes.clips_shared import CLIP_SIZE, VIEW, frames, recipe, view
from tiny_pipelines import (
    FRAMES,
    HALFWAY,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _clip_of_pictures,
    _picture,
    _pictures,
    _wan,
    clip_size,
    heads,
)

LONG = 2 * FRAMES - 1
WAN_SIZE: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}


def _width(scale: int) -> Parts:
    return {**heads(scale), "text_dim": scale * T5_WIDTH, "ffn_dim": scale * 64, "freq_dim": 16, "rope_max_seq_len": 32}


def _with(model: str, scale: int = 1, *, without: tuple[str, ...] = (), **settings: Any) -> Parts:
    """Wan with another transformer."""
    width = {name: value for name, value in _width(scale).items() if name not in without}
    transformer = getattr(diffusers, model)(**{"num_layers": 3, **width, **settings})
    return {**_wan(scale), "transformer": transformer}


def _added(scale: int) -> Parts:
    """The widths of a picture's view beside the prompt."""
    return {"image_dim": clip_size(scale)["hidden_size"], "added_kv_proj_dim": scale * TRANSFORMER_WIDTH}


def _two(scale: int = 1) -> Parts:
    """Wan 2.2: one transformer for the noisy half of the steps, another for the rest."""
    return {**_wan(scale), "transformer_2": _wan(scale)["transformer"], "boundary_ratio": 0.8}


def _first_frame(scale: int = 1) -> Parts:
    """Wan 2.2 of 5B: the picture is the clip's first latent frame, which has its own time."""
    return {**_wan(scale), "expand_timesteps": True}


def _vace(scale: int = 1) -> Parts:
    return _with("WanVACETransformer3DModel", scale, vace_layers=[0, 2], vace_in_channels=16 + 16 + 4 * 4)


def _animate(scale: int = 1) -> Parts:
    parts = _with(
        "WanAnimateTransformer3DModel",
        scale,
        **_added(scale),
        num_layers=4,
        inject_face_latents_blocks=2,
        motion_encoder_channel_sizes={str(size): 8 for size in (4, 8, 16, VIEW)},
        motion_encoder_size=VIEW,
        motion_style_dim=16,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
    )
    return {**parts, **view(scale)}


def _performance(height: int) -> Parts:
    faces = [picture.resize((VIEW, VIEW)) for picture in _pictures(LONG, PIXELS)]
    return {**_picture(height), "pose_video": _pictures(LONG, height), "face_video": faces}


def _repainted(height: int) -> Parts:
    mask = Image.new("L", (PIXELS, height))
    mask.paste(255, (PIXELS // 4, height // 4, 3 * PIXELS // 4, 3 * height // 4))
    clip = _pictures(FRAMES + 1, height)
    return {"video": clip[:-1], "mask": [mask] * FRAMES, "reference_images": clip[-1:]}


def _skyreels(scale: int = 1, **settings: Any) -> Parts:
    return _with("SkyReelsV2Transformer3DModel", scale, **settings)


def _skyreels_picture(scale: int = 1) -> Parts:
    return {**_skyreels(scale, **_added(scale), in_channels=16 + 4 + 16), **view(scale, projected=True)}


def _chronoedit(scale: int = 1) -> Parts:
    return {**_with("ChronoEditTransformer3DModel", scale, **_added(scale), in_channels=16 + 4 + 16), **view(scale)}


def _anyflow(model: str, scale: int = 1, **settings: Any) -> Parts:
    return {**_with(model, scale, **settings), "scheduler": diffusers.FlowMapEulerDiscreteScheduler(shift=3.0)}


def _helios(scale: int = 1, stages: int = 1) -> Parts:
    parts = _with("HeliosTransformer3DModel", scale, without=("rope_max_seq_len",), rope_dim=(4, 6, 6))
    return {**parts, "scheduler": diffusers.HeliosScheduler(stages=stages, gamma=0.3)}


FORCING: Parts = {
    **WAN_SIZE,
    "num_frames": LONG,
    "base_num_frames": FRAMES,
    "overlap_history": 5,  # What repeats is not noised again here: the class does that with an unseeded generator.
}
HELIOS: Parts = {**WAN_SIZE, "num_frames": LONG, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]}

CASES: tuple[TinyCase, ...] = (
    recipe("WanTwoTransformers", _two, pipeline="Wan", **WAN_SIZE, guidance_scale_2=3.0),
    recipe("WanFirstFrame", _first_frame, _picture, pipeline="WanImageToVideo", **WAN_SIZE),
    recipe("WanVideoToVideo", _wan, _clip_of_pictures, height=PIXELS, width=PIXELS, **HALFWAY, max_sequence_length=16),
    recipe("WanVACE", _vace, _repainted, **WAN_SIZE),
    recipe(
        "WanAnimate",
        _animate,
        _performance,
        height=PIXELS,
        width=PIXELS,
        segment_frame_length=FRAMES,
        guidance_scale=2.0,
        max_sequence_length=TEXT_TOKENS,
    ),
    recipe("SkyReelsV2", _skyreels, **WAN_SIZE),
    recipe("SkyReelsV2ImageToVideo", _skyreels_picture, _picture, **WAN_SIZE),
    recipe("SkyReelsV2DiffusionForcing", partial(_skyreels, inject_sample_info=True), **FORCING, ar_step=1),
    recipe("SkyReelsV2DiffusionForcingImageToVideo", _skyreels, _picture, **FORCING),
    recipe("SkyReelsV2DiffusionForcingVideoToVideo", _skyreels, _clip_of_pictures, **FORCING),
    recipe("LucyEdit", partial(_wan, in_channels=2 * 16), frames("video"), **WAN_SIZE),
    recipe("ChronoEdit", _chronoedit, _picture, **WAN_SIZE),
    recipe("AnyFlow", partial(_anyflow, "AnyFlowTransformer3DModel"), **WAN_SIZE, guidance_scale=2.0),
    recipe(
        "AnyFlowFAR",
        partial(_anyflow, "AnyFlowFARTransformer3DModel", chunk_partition=(1, 2)),
        **WAN_SIZE,
        guidance_scale=2.0,
    ),
    recipe("Helios", _helios, **HELIOS),
    recipe("HeliosPyramid", partial(_helios, stages=3), **HELIOS, pyramid_num_inference_steps_list=[1, 1, 1]),
)

OPTIONAL_PARTS: dict[str, str] = {}
