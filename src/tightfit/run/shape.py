"""The arguments of a pipeline's call → what it asks for, and what of that decides how many bytes it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tightfit.errors import TightfitError
from tightfit.records import Request
from tightfit.run.request import NAMES, usual_side

__all__ = ["Shape", "request_of", "shape_of"]

# plain arguments that decide nothing about bytes, or that a request has a field for
_LEFT_OUT = {*NAMES.values(), "num_videos_per_prompt", "return_dict", "callback_steps"}
_PICTURES = ("image", "video", "control_image", "mask_image")  # whose size is that of the call, if it names none


class Shape(NamedTuple):
    """What decides how many bytes a call takes."""

    height: int | None
    width: int | None
    frames: int | None
    batch: int
    guided: bool | None
    others: frozenset[tuple[str, bool | int | None]] = frozenset()


def request_of(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Request | None:
    """What a call of `pipe` asks for; None where that is nothing that a request could say: the pipeline will tell."""
    try:
        given = inspect.signature(type(pipe).__call__).bind_partial(pipe, *args, **kwargs).arguments
    except TypeError:
        return None
    found = {ours: given[theirs] for ours, theirs in NAMES.items() if theirs in given and ours != "negative prompt"}
    found = {name: value for name, value in found.items() if isinstance(value, int | float)}
    each = next((given[name] for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in given), 1)
    found["batch"] = _prompts(given) * (each or 1)
    usual = _defaults(pipe)
    found["arguments"] = {
        name: value
        for name, value in given.items()
        if name not in _LEFT_OUT and isinstance(value, bool | int | float | None) and value != usual.get(name)
    }
    if not found.keys() & {"height", "width"}:
        found |= _size_of(given)
    if "frames" not in found and (frames := _frames_of(given.get("video"))):
        found["frames"] = frames
    try:
        return Request.from_mapping(found)
    except TightfitError:
        return None


def _prompts(given: Mapping[str, Any]) -> int:
    prompt, embeds = given.get("prompt"), given.get("prompt_embeds")
    if isinstance(prompt, list | tuple):
        return len(prompt)
    return len(embeds) if isinstance(embeds, torch.Tensor) and prompt is None else 1


def _frames_of(video: Any) -> int | None:
    """Of the clip that the call starts from: a list of pictures, or an array of shape (..., frames, C, H, W)."""
    if isinstance(video, list | tuple):
        return _frames_of(video[0]) if len(video) == 1 and getattr(video[0], "ndim", 0) >= 4 else len(video)
    shape: tuple[int, ...] = getattr(video, "shape", ())
    return int(shape[-4]) if len(shape) >= 4 else None


def _size_of(given: Mapping[str, Any]) -> dict[str, int]:
    """Of the pictures that the call starts from."""
    for name in _PICTURES:
        picture = given.get(name)
        while isinstance(picture, list | tuple) and picture:
            picture = picture[0]
        if isinstance(picture, torch.Tensor) and picture.ndim >= 3:
            return {"height": int(picture.shape[-2]), "width": int(picture.shape[-1])}
        size = getattr(picture, "size", None)
        if isinstance(size, tuple) and len(size) == 2:
            return {"height": size[1], "width": size[0]}
    return {}


def shape_of(pipe: Any, request: Request) -> Shape:
    """`request` with what the pipeline makes of that which it leaves open."""
    usual = _defaults(pipe)

    def said(name: str) -> Any:
        value = getattr(request, name)
        default = usual.get(NAMES[name])
        return default if value is None and isinstance(default, int | float) else value

    height, width, guidance = said("height"), said("width"), said("guidance")
    if NAMES["height"] in usual and hasattr(pipe, "default_sample_size"):
        height, width = height or usual_side(pipe), width or usual_side(pipe)
    others = {name: value for name, value in request.arguments.items() if value != usual.get(name)}
    return Shape(
        height,
        width,
        said("frames"),
        request.batch,
        None if guidance is None else guidance > 1,
        frozenset((name, _switched(value, usual.get(name))) for name, value in others.items()),
    )


def _defaults(pipe: Any) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(type(pipe).__call__).parameters.items()}


def _switched(value: bool | int | float | None, usual: Any) -> bool | int | None:
    """Of a scale only what it switches: nothing at 0, another pass of the denoiser above 1."""
    if isinstance(value, float) or (isinstance(value, int) and isinstance(usual, float)):
        return (value > 0) + (value > 1)
    return value
