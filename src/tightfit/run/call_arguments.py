"""Arguments of a pipeline call ⇄ its Request."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image

from tightfit.apply.activations.vae_tiling import pixels_per_latent
from tightfit.devices.ram import ram_bytes
from tightfit.errors import RequestError, TightfitError, unknown_name
from tightfit.run.argument_values import GREY, described, dummy_value
from tightfit.run.prompt import Prompt
from tightfit.schema.request import Request
from tightfit.units import format_bytes

__all__ = [
    "NAMES",
    "OURS",
    "CallShape",
    "Prompt",
    "call_arguments",
    "dummy_inputs",
    "given_to",
    "guidance_of",
    "request_of",
    "request_of_example",
    "shape_of",
    "size_multiple",
    "usual_side",
]


# tightfit's name → the parameter of diffusers' pipelines
NAMES = {
    "height": "height",
    "width": "width",
    "frames": "num_frames",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "batch": "num_images_per_prompt",
    "negative prompt": "negative_prompt",
}
OURS = {theirs: ours for ours, theirs in NAMES.items()}


def call_arguments(pipe: Any, prompt: Prompt | None, request: Request) -> dict[str, Any]:
    """Return keyword arguments for `pipe(...)`; RequestError for arguments and sizes that it does not accept.

    `prompt` is None for pipelines that take none. Each item of the batch has its own CPU generator, seeded seed,
    seed + 1, …: images do not depend on the batch size or the device. RequestError also if the images alone exceed RAM.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {"prompt": prompt.text} if prompt is not None else {}
    for field in ("height", "width", "frames", "steps", "guidance"):
        value = getattr(request, field)
        if value is not None and not (field == "frames" and "video" in request.arguments):  # the clip has its own
            arguments[NAMES[field]] = value
    arguments |= {name: dummy_value(value) for name, value in request.arguments.items()}
    if prompt is not None and prompt.negative is not None:
        arguments["negative_prompt"] = prompt.negative
    if request.batch > 1:
        many = [name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in taken]
        arguments[many[0] if many else "num_images_per_prompt"] = request.batch
    for name in arguments:
        if name not in taken:
            raise RequestError(f"{type(pipe).__name__} takes no {OURS.get(name, name)}", name=name)
    _check_size(pipe, request)
    seed = prompt.seed if prompt is not None else 0
    generators = [torch.Generator().manual_seed(seed + index) for index in range(request.batch)]
    return arguments | {"generator": generators if request.batch > 1 else generators[0]}


def size_multiple(pipe: Any) -> int:
    """Return the pixels of which heights and widths must be multiples: pixels per latent times patch size."""
    autoencoder = getattr(pipe, "vae", None)
    multiple = pixels_per_latent(autoencoder) if autoencoder is not None else 1
    denoiser = getattr(pipe, "transformer", None)
    if denoiser is None:
        return multiple
    patch = denoiser.config.get("patch_size") or 1
    patch = patch if isinstance(patch, int) else patch[-1]
    # Flux and Chroma pipelines pack 2×2 latents outside the network
    packed = 2 if patch == 1 and type(pipe).__name__.startswith(("Flux", "Chroma")) else 1
    return int(multiple * patch * packed)


def _check_size(pipe: Any, request: Request) -> None:
    multiple = size_multiple(pipe)
    for side in ("height", "width"):
        pixels = getattr(request, side)
        if pixels is not None and pixels % multiple:
            below, above = pixels // multiple * multiple, -(-pixels // multiple) * multiple
            near = f"{below} or {above}" if below else str(above)
            raise RequestError(
                f"{side} {pixels} is not a multiple of {multiple}, as this model needs: {near} would do",
                **{side: pixels, "multiple": multiple},
            )
    default = usual_side(pipe)
    area = (request.height or default) * (request.width or default) * (request.frames or 1) * request.batch
    needed, ram = area * 3 * 4, ram_bytes()
    if needed > ram:
        raise RequestError(
            f"the pictures alone would take {format_bytes(needed)}, and RAM has {format_bytes(ram)}: ask for less",
            needed_bytes=needed,
            ram_bytes=ram,
        )


def usual_side(pipe: Any) -> int:
    """Return the default side in pixels, about: pipelines define it in latents, if at all; 512 if not."""
    latents = getattr(pipe, "default_sample_size", None)
    if latents is None and getattr(pipe, "unet", None) is not None:
        latents = pipe.unet.config.get("sample_size")
    return latents * pixels_per_latent(pipe.vae) if isinstance(latents, int) and hasattr(pipe, "vae") else 512


_FIELDS = {ours: theirs for ours, theirs in NAMES.items() if ours not in ("batch", "negative prompt")}
_EACH = ("num_images_per_prompt", "num_videos_per_prompt")
_LEFT_OUT = ("return_dict", "generator")  # they affect only values, or the type of the output
_USUAL = {"prompt": "text"}  # descriptions that are left out, because every call has them
_PICTURES = ("image", "video", "control_image", "mask_image")  # the size of the call, if it has no height and width


class CallShape(NamedTuple):
    """All of a call that its memory depends on. None: unknown."""

    height: int | None  # pixels
    width: int | None  # pixels
    frames: int | None
    batch: int
    guided: bool | None  # whether the guidance scale is above 1
    others: frozenset[tuple[str, bool | int | str | None]] = frozenset()  # further arguments, described


def request_of(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Request | None:
    """Return the Request of a call of `pipe`; None if it does not accept these arguments."""
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


def request_of_example(pipe: Any, example: Mapping[str, Any]) -> Request:
    """Return the Request of an example call's arguments. RequestError if `pipe` does not accept them."""
    request = request_of(pipe, (), example)
    if request is None:
        taken = list(inspect.signature(type(pipe).__call__).parameters)[1:]
        name = next(name for name in example if name not in taken)
        raise RequestError(unknown_name(f"argument of {type(pipe).__name__}", name, taken), name=name)
    return request


def _is_legal(field: str, value: Any) -> bool:
    """Whether `value` is valid for a request's `field`."""
    try:
        return value is not None and bool(Request(**{field: value}))
    except TightfitError:
        return False


def given_to(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call of `pipe` by name; None if it does not accept them."""
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


def _described(given: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the arguments that have no field of a request and are not the default. Callbacks are left out."""
    found = {
        name: described(name, value)
        for name, value in given.items()
        if name not in _LEFT_OUT and not name.startswith("callback")
    }
    if found.get("output_type") != "latent":  # other types are converted on the host
        found.pop("output_type", None)
    return {n: v for n, v in found.items() if v != default.get(n) and (n not in _USUAL or v != _USUAL[n])}


def _prompts(given: Mapping[str, Any]) -> int:
    prompt, embeds = given.get("prompt"), given.get("prompt_embeds")
    if isinstance(prompt, list | tuple):
        return len(prompt)
    return len(embeds) if isinstance(embeds, torch.Tensor) and prompt is None else 1


def _frames_of(video: Any) -> int | None:
    """Frames of the call's input clip: a list of images, or an array of shape (..., frames, C, H, W)."""
    if isinstance(video, list | tuple):
        return _frames_of(video[0]) if len(video) == 1 and getattr(video[0], "ndim", 0) >= 4 else len(video)
    shape: tuple[int, ...] = getattr(video, "shape", ())
    return int(shape[-4]) if len(shape) >= 4 else None


def _size_of(given: Mapping[str, Any]) -> dict[str, int]:
    """Height and width of the call's input images, in pixels; empty if there are none."""
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
    """Return the shape of `request`, with the pipeline's defaults for fields that are None."""
    defaults = _defaults(pipe)

    def said(name: str) -> Any:
        value = getattr(request, name)
        default = defaults.get(NAMES[name])
        return default if value is None and isinstance(default, int | float) else value

    height, width, guidance = said("height"), said("width"), guidance_of(pipe, request)
    if NAMES["height"] in defaults and hasattr(pipe, "default_sample_size"):
        height, width = height or usual_side(pipe), width or usual_side(pipe)
    others = {name: value for name, value in request.arguments.items() if value != defaults.get(name)}
    others |= {} if request.backward is None else {"backward": request.backward}
    return CallShape(
        height,
        width,
        said("frames"),
        request.batch,
        None if guidance is None else guidance > 1,
        frozenset((name, _switched(value, defaults.get(name))) for name, value in others.items()),
    )


def guidance_of(pipe: Any, request: Request) -> float | None:
    """Return the guidance scale of `request`: by default the pipeline's, or none in training. None: unknown."""
    default = _defaults(pipe).get(NAMES["guidance"])
    if request.guidance is not None or not isinstance(default, int | float):
        return request.guidance
    return 1.0 if request.trains else float(default)


def _defaults(pipe: Any) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(type(pipe).__call__).parameters.items()}


def _switched(value: bool | int | float | str | None, default: Any) -> bool | int | str | None:
    """Reduce a scale to what it switches: 0 (off), 1 (above 0), 2 (above 1: one more denoiser call)."""
    if isinstance(value, float) or (isinstance(value, int) and isinstance(default, float)):
        return (value > 0) + (value > 1)
    return value


def dummy_inputs(pipe: Any, request: Request, given: Mapping[str, Any]) -> tuple[dict[str, Any], Request]:
    """Return dummy arguments `image`, `mask_image` or `video` that `pipe` accepts and that are not `given`.

    Also return `request` without the fields that these set: some pipelines take size and frames from their input.
    RequestError if a clip is needed and the request has no number of frames.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    height, width = (side or usual_side(pipe) for side in (request.height, request.width))
    found: dict[str, Any] = {}
    if "image" in taken:
        found["image"] = Image.new("RGB", (width, height), GREY)
        if "mask_image" in taken:
            found["mask_image"] = Image.new("L", (width, height), 255)
    elif "video" in taken and not {"video"} & {*given, *request.arguments}:
        if request.frames is None:
            raise RequestError(
                f"{type(pipe).__name__} starts from a clip: say of how many frames, e.g. frames=49",
                pipeline=type(pipe).__name__,
            )
        found["video"] = [Image.new("RGB", (width, height), GREY)] * request.frames
    theirs = {"height", "width"} if found and "height" not in taken else set()
    theirs |= {"frames"} if "video" in found and "num_frames" not in taken else set()
    left = Request(**{name: value for name, value in request if name not in theirs})
    said = {*given, *request.arguments}
    return {name: value for name, value in found.items() if name not in said}, left
