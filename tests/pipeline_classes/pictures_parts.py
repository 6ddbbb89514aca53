"""What recipes of picture pipelines share: cases of classes that take fewer arguments, and reading models."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from tiny_pipelines import PIXELS, Parts, TinyCase, _no_picture, _picture, _tiny

USUAL = ("prompt", "negative_prompt", "num_inference_steps", "output_type", "generator")


def _case(
    pipeline: str,
    parts: Callable[[int], Parts],
    inputs: Callable[[int], Parts] = _no_picture,
    *,
    draws: bool = False,
    attributes: Parts | None = None,
    **settings: Any,
) -> TinyCase:
    """A `_tiny` case without those of the usual arguments that the class does not take.

    A class that `draws` takes numbers from torch's own generator, whatever generator it is given. `attributes` of the
    pipeline are sizes that no argument sets.
    """
    case = _tiny(pipeline, parts, inputs, **settings)

    def make(scale: int = 1) -> DiffusionPipeline:
        pipe = case.make(scale)
        for name, value in (attributes or {}).items():
            setattr(pipe, name, value)
        return pipe

    def call(height: int = PIXELS) -> Parts:
        if draws:
            torch.manual_seed(1)
        taken = inspect.signature(getattr(diffusers, f"{pipeline}Pipeline").__call__).parameters
        return {name: value for name, value in case.call(height).items() if name in taken or name not in USUAL}

    return replace(case, make=make, call=call)


def _again(model: Any, **settings: Any) -> Any:
    """Another model of the same class and configuration, but for `settings`."""
    return type(model)(**{name: value for name, value in model.config.items() if name[0] != "_"} | settings)


def _steady(vae: Any) -> Any:
    """`vae` with larger biases: where its few channels are all near nought, norms over them make much of rounding."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d) and module.bias is not None:
            module.bias.data.add_(1.0)
    return vae


def _control_picture(height: int) -> Parts:
    return {"control_image": _picture(height)["image"]}


def _eightfold_vae(**settings: Any) -> diffusers.AutoencoderKL:
    """For classes that reckon with an autoencoder that shrinks each side eight times, whatever it does."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        sample_size=PIXELS // 2,
        **settings,
    )
