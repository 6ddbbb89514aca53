"""Pipelines made of blocks, with the parts of those that are not."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import diffusers
import torch
from diffusers import DiffusionPipeline

from pipeline_classes.clips_hunyuan import _hunyuan_15
from pipeline_classes.clips_shared import CLIP_SIZE, speak
from pipeline_classes.clips_wan import LONG, WAN_SIZE, _helios, _repainted, _two, _vace
from tiny_pipelines import (
    PIXELS,
    TEXT_TOKENS,
    Parts,
    TinyCase,
    _ltx,
    _no_picture,
    _picture,
    _wan,
    _wan_image_to_video,
)


def _quiet(blocks: Any) -> None:
    """Takes the progress bars off, which every loop has of its own."""
    if hasattr(blocks, "set_progress_bar_config"):
        blocks.set_progress_bar_config(disable=True)
    for block in getattr(blocks, "sub_blocks", {}).values():
        _quiet(block)


def modular(
    name: str,
    parts: Callable[[int], Parts],
    inputs: Callable[[int], Parts] = _no_picture,
    output: str | list[str] = "videos",
    **settings: Any,
) -> TinyCase:
    """A case of a pipeline made of blocks, of which the call gives one of its outputs."""

    def make(scale: int = 1) -> DiffusionPipeline:
        pipe: Any = getattr(diffusers, f"{name}Pipeline")()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            known = {*pipe.component_names, *pipe.config}
            pipe.update_components(**{key: value for key, value in parts(scale).items() if key in known})
            for component in pipe.components.values():
                if isinstance(component, torch.nn.Module):
                    speak(component.eval())
        _quiet(pipe.blocks)
        return cast(DiffusionPipeline, pipe)

    def call(height: int = PIXELS) -> Parts:
        usual: Parts = {"prompt": "a red fox", "negative_prompt": "blurry", "num_inference_steps": 2}
        usual |= {"output_type": "pt", "generator": torch.Generator().manual_seed(1), "output": output}
        size = {"height": height} if "height" in settings else {}
        return {**usual, **settings, **size, **inputs(height)}

    return TinyCase(name, make, call)


def _two_pictures(scale: int = 1) -> Parts:
    """Wan 2.2 from a picture, which both transformers take beside the noise."""
    wide = _wan(scale, in_channels=16 + 4 + 16)
    return {**wide, "transformer_2": _wan(scale, in_channels=16 + 4 + 16)["transformer"]}


def _two_vace(scale: int = 1) -> Parts:
    return {**_vace(scale), "transformer_2": _vace(scale)["transformer"]}


def _distilled(scale: int = 1) -> Parts:
    return {**_helios(scale), "scheduler": diffusers.HeliosDMDScheduler(stages=3, gamma=0.3)}


LTX_SIZE: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}
HELIOS: Parts = {**WAN_SIZE, "num_frames": LONG, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]}
PYRAMID: Parts = {**HELIOS, "pyramid_num_inference_steps_list": [1, 1, 1]}

CASES: tuple[TinyCase, ...] = (
    modular("WanModular", _wan, **WAN_SIZE),
    modular("Wan22Modular", _two, **WAN_SIZE),
    modular("WanImage2VideoModular", _wan_image_to_video, _picture, **WAN_SIZE),
    modular("Wan22Image2VideoModular", _two_pictures, _picture, **WAN_SIZE),
    modular("Wan22VaceModular", _two_vace, _repainted, **WAN_SIZE),
    modular("LTXModular", _ltx, **LTX_SIZE),
    modular("HunyuanVideo15Modular", _hunyuan_15, **CLIP_SIZE),
    modular("HeliosModular", _helios, **HELIOS),
    modular("HeliosPyramidModular", partial(_helios, stages=3), **PYRAMID),
    modular("HeliosPyramidDistilledModular", _distilled, **PYRAMID),
)

OPTIONAL_PARTS: dict[str, str] = {}
