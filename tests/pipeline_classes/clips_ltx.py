"""LTX from pictures, clips and latents, and LTX 2, which makes sound with the clip."""

import diffusers
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

from pipeline_classes.clips_shared import CLIP_SIZE, frames, recipe
from tiny_pipelines import FRAMES, TEXT_TOKENS, Parts, TinyCase, _ltx, _pictures

LTX_SIZE: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}


def _upsample(scale: int = 1) -> Parts:
    upsampler = LTXLatentUpsamplerModel(in_channels=8, mid_channels=scale * 32, num_blocks_per_stage=1)
    return {"vae": _ltx()["vae"], "latent_upsampler": upsampler}


def _plain_schedule(scale: int = 1) -> Parts:
    return {**_ltx(scale), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)}


def _long(scale: int = 1) -> Parts:
    return {**_ltx(scale), "scheduler": diffusers.LTXEulerAncestralRFScheduler()}


def _conditions(height: int) -> Parts:
    """How the clip begins, and a picture of how it ends."""
    clip = _pictures(FRAMES, height)
    beginning = LTXVideoCondition(video=clip[:-1], frame_index=0)
    return {"conditions": [beginning, LTXVideoCondition(image=clip[-1], frame_index=FRAMES - 1, strength=0.5)]}


def _first_picture(height: int) -> Parts:
    return {"cond_image": _pictures(1, height)[0]}


LONG: Parts = {
    **LTX_SIZE,
    "num_frames": 2 * FRAMES - 1,
    "guidance_scale": 3.0,
    "temporal_tile_size": 12,
    "temporal_overlap": 4,
    "decode_horizontal_tiles": 2,
    "decode_vertical_tiles": 2,
    "decode_overlap": 1,
}

CASES: tuple[TinyCase, ...] = (
    recipe("LTXCondition", _plain_schedule, _conditions, **LTX_SIZE),
    recipe("LTXLatentUpsample", _upsample, frames("video"), height=64, width=64),
    recipe("LTXI2VLongMultiPrompt", _long, _first_picture, **LONG, prompt="a red fox | a blue fox"),
)

OPTIONAL_PARTS: dict[str, str] = {}
