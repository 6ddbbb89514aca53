"""The arguments of a pipeline's call → what it asks for, and what of that decides how much memory it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tightfit.errors import RequestError, TightfitError, unknown_name
from tightfit.records import Request
from tightfit.run.arguments import described
from tightfit.run.request import NAMES, OURS, usual_side

__all__ = ["CallShape", "asked_by", "given_to", "request_of", "shape_of"]

_FIELDS = {ours: theirs for ours, theirs in NAMES.items() if ours not in ("batch", "negative prompt")}
_EACH = ("num_images_per_prompt", "num_videos_per_prompt")
_LEFT_OUT = ("return_dict", "generator")  # nothing depends on them but numbers, or what they come in
_USUAL = {"prompt": "text"}  # descriptions of what every call has
_PICTURES = ("image", "video", "control_image", "mask_image")  # whose size is that of the call, if it names none


class CallShape(NamedTuple):
    """What decides how many bytes a call takes."""

    height: int | None
    width: int | None
    frames: int | None
    batch: int
    guided: bool | None
    others: frozenset[tuple[str, bool | int | str | None]] = frozenset()


def request_of(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Request | None:
    """What a call of `pipe` asks for; None where it does not take these arguments."""
    given = given_to(pipe, args, kwargs)
    if given is None:
        return None
    found = {ours: given[theirs] for ours, theirs in _FIELDS.items() if _is_legal(ours, given.get(theirs))}
    left = {name: value for name, value in given.items() if OURS.get(name) not in found and name not in _EACH}
    arguments = _described(left, _defaults(pipe))
    if not found.keys() & {"height", "width"}:
        found |= _size_of(given)
    if "frames" not in found and (frames := _frames_of(given.get("video"))):
        found["frames"] = frames
    each = next((given[name] for name in _EACH if name in given), 1)
    batch = _prompts(given) * (each if isinstance(each, int) else 1)
    return Request(**found, batch=max(batch, 1), arguments=arguments)


def asked_by(pipe: Any, example: Mapping[str, Any]) -> Request:
    """What the arguments of an example call ask for. RequestError where `pipe` does not take them."""
    request = request_of(pipe, (), example)
    if request is None:
        taken = list(inspect.signature(type(pipe).__call__).parameters)[1:]
        name = next(name for name in example if name not in taken)
        raise RequestError(unknown_name(f"argument of {type(pipe).__name__}", name, taken), name=name)
    return request


def _is_legal(field: str, value: Any) -> bool:
    """Whether `value` can be that of a request's `field`."""
    try:
        return value is not None and bool(Request(**{field: value}))
    except TightfitError:
        return False


def given_to(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call of `pipe`, by name; None where it does not take them."""
    signature = inspect.signature(type(pipe).__call__)
    try:
        given = dict(signature.bind_partial(pipe, *args, **kwargs).arguments)
    except TypeError:
        return None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    given.pop(next(iter(signature.parameters)), None)
    return given


def _described(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What is given beside a request's own fields, where it is not the default. Callbacks are left out."""
    found = {
        name: described(name, value)
        for name, value in given.items()
        if name not in _LEFT_OUT and not name.startswith("callback")
    }
    if found.get("output_type") != "latent":  # whatever pictures become, they become it on the host
        found.pop("output_type", None)
    return {n: value for n, value in found.items() if value != usual.get(n) and (n not in _USUAL or value != _USUAL[n])}


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


def shape_of(pipe: Any, request: Request) -> CallShape:
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
    return CallShape(
        height,
        width,
        said("frames"),
        request.batch,
        None if guidance is None else guidance > 1,
        frozenset((name, _switched(value, usual.get(name))) for name, value in others.items()),
    )


def _defaults(pipe: Any) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(type(pipe).__call__).parameters.items()}


def _switched(value: bool | int | float | str | None, usual: Any) -> bool | int | str | None:
    """Of a scale only what it switches: nothing at 0, another pass of the denoiser above 1."""
    if isinstance(value, float) or (isinstance(value, int) and isinstance(usual, float)):
        return (value > 0) + (value > 1)
    return value
