"""Request + pipeline → the pipeline's own arguments, or one clear line about what it cannot take."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.apply.activations.cutting import pixels_per_latent
from tightfit.devices.seam import ram_bytes
from tightfit.errors import RequestError
from tightfit.records import Request
from tightfit.run.arguments import dummy_value
from tightfit.units import format_bytes

__all__ = ["NAMES", "OURS", "Prompt", "call_arguments", "size_multiple", "usual_side"]

# what is asked for → what pipelines call it
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


@dataclass(frozen=True)
class Prompt:
    """What is asked for in words, and the seed that makes it reproducible."""

    text: str
    seed: int
    negative: str | None = None

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise RequestError("the prompt is empty: say what to draw, e.g. 'a red circle on the left'")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"the seed must be between 0 and 2⁶³ - 1, not {self.seed}", seed=self.seed)


def call_arguments(pipe: Any, prompt: Prompt, request: Request) -> dict[str, Any]:
    """Keyword arguments for `pipe(...)`; RequestError for what this pipeline does not take or cannot hold.

    Each item of the batch has a generator of its own, seeded seed, seed + 1, …, on the CPU: the same pictures
    whatever the batch and the device.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {"prompt": prompt.text}
    for field in ("height", "width", "frames", "steps", "guidance"):
        value = getattr(request, field)
        if value is not None and not (field == "frames" and "video" in request.arguments):  # the clip has so many
            arguments[NAMES[field]] = value
    arguments |= {name: dummy_value(value) for name, value in request.arguments.items()}
    if prompt.negative is not None:
        arguments["negative_prompt"] = prompt.negative
    if request.batch > 1:
        many = [name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in taken]
        arguments[many[0] if many else "num_images_per_prompt"] = request.batch
    for name in arguments:
        if name not in taken:
            raise RequestError(f"{type(pipe).__name__} takes no {OURS.get(name, name)}", name=name)
    _check_size(pipe, request)
    generators = [torch.Generator().manual_seed(prompt.seed + index) for index in range(request.batch)]
    return arguments | {"generator": generators if request.batch > 1 else generators[0]}


def size_multiple(pipe: Any) -> int:
    """Heights and widths must be multiples of this many pixels: a latent's, times the denoiser's patch."""
    autoencoder = getattr(pipe, "vae", None)
    multiple = pixels_per_latent(autoencoder) if autoencoder is not None else 1
    denoiser = getattr(pipe, "transformer", None)
    if denoiser is None:
        return multiple
    patch = denoiser.config.get("patch_size") or 1
    patch = patch if isinstance(patch, int) else patch[-1]
    # Flux and its kind pack 2×2 latents outside the network
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
    usual = usual_side(pipe)
    area = (request.height or usual) * (request.width or usual) * (request.frames or 1) * request.batch
    needed, ram = area * 3 * 4, ram_bytes()
    if needed > ram:
        raise RequestError(
            f"the pictures alone would take {format_bytes(needed)}, and RAM has {format_bytes(ram)}: ask for less",
            needed_bytes=needed,
            ram_bytes=ram,
        )


def usual_side(pipe: Any) -> int:
    """About how many pixels a side has that is not asked for: pipelines say it in latents, where they say it."""
    latents = getattr(pipe, "default_sample_size", None)
    if latents is None and getattr(pipe, "unet", None) is not None:
        latents = pipe.unet.config.get("sample_size")
    return latents * pixels_per_latent(pipe.vae) if isinstance(latents, int) and hasattr(pipe, "vae") else 512
