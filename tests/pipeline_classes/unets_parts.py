"""What the recipes of the pipelines around U-Nets share: how a case is made, and the parts that several have."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from PIL import Image

from tiny_pipelines import (
    CLIP_WIDTH,
    LATENT_PIXELS,
    PIXELS,
    Parts,
    TinyCase,
    _no_picture,
    _pictures,
    clip_size,
    heads,
)

VIEW = PIXELS // 2  # The side of the picture that an image encoder sees.
STEPS: Parts = {"num_inference_steps": 2, "output_type": "pt"}
PROMPTS: Parts = {**STEPS, "prompt": "a red fox", "negative_prompt": "blurry"}


def seeded(*shape: int, seed: int = 3, low: float | None = None) -> torch.Tensor:
    """Normal noise, or uniform from `low` to 1 where it is given."""
    generator = torch.Generator().manual_seed(seed)
    if low is None:
        return torch.randn(shape, generator=generator)
    return low + (1 - low) * torch.rand(shape, generator=generator)


def recipe(
    name: str,
    parts: Callable[[int], Parts],
    inputs: Callable[[int], Parts] = _no_picture,
    *,
    common: Parts = PROMPTS,
    pipeline: str | Callable[..., Any] | None = None,
    adapt: Callable[[Any, int], None] | None = None,
    generator: bool = True,
    **settings: Any,
) -> TinyCase:
    """The case of the class `pipeline` (by default, what `name` says); `adapt` changes what was made."""
    chosen = pipeline or f"{name}Pipeline"
    pipeline_class = getattr(diffusers, chosen) if isinstance(chosen, str) else chosen

    def make(scale: int = 1) -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe: Any = pipeline_class(**parts(scale))
            for component in pipe.components.values():
                if isinstance(component, torch.nn.Module):
                    component.eval()
            pipe.set_progress_bar_config(disable=True)
            if adapt is not None:
                adapt(pipe, scale)
        return pipe  # type: ignore[no-any-return]

    def call(height: int = PIXELS) -> Parts:
        size = {"height": height} if "height" in settings else {}
        noise = {"generator": torch.Generator().manual_seed(1)} if generator else {}
        return {**common, **settings, **size, **inputs(height), **noise}

    return TinyCase(name, make, call)


def without(parts: Parts, *names: str) -> Parts:
    return {name: part for name, part in parts.items() if name not in names}


def joined(*inputs: Callable[[int], Parts]) -> Callable[[int], Parts]:
    """The inputs of all."""

    def join(height: int) -> Parts:
        return {name: value for each in inputs for name, value in each(height).items()}

    return join


def picture_as(name: str, seed: int = 0) -> Callable[[int], Parts]:
    """A picture, which differs from the usual one, as the argument `name`."""

    def make(height: int) -> Parts:
        return {name: _pictures(seed + 2, height)[-1]}

    return make


def some_pictures(name: str, count: int) -> Callable[[int], Parts]:
    return lambda height: {name: _pictures(count, height)}


def mask_of(height: int, width: int = PIXELS) -> Image.Image:
    mask = Image.new("L", (width, height))
    mask.paste(255, (width // 4, height // 4, 3 * width // 4, 3 * height // 4))
    return mask


def vision(scale: int = 1, name: str = "image_encoder", processor: str = "feature_extractor", **other: Any) -> Parts:
    """A CLIP image encoder with its projection, and what makes its pictures."""
    settings = {**clip_size(scale), "image_size": VIEW, "patch_size": 8, **other}
    config = transformers.CLIPVisionConfig(**settings)
    size = {"height": VIEW, "width": VIEW}
    return {
        name: transformers.CLIPVisionModelWithProjection(config),
        processor: transformers.CLIPImageProcessorPil(size={"shortest_edge": VIEW}, crop_size=size),
    }


def prior_transformer(scale: int = 1, **settings: Any) -> diffusers.PriorTransformer:
    """The model that makes a picture's embedding of a prompt's, as wide as CLIP's."""
    size: Parts = {"embedding_dim": scale * CLIP_WIDTH, "num_layers": 4, "num_embeddings": 77, **settings}
    model = diffusers.PriorTransformer(**heads(2 * scale), **size)
    begun_with_zeros = ("positional_embedding", "prd_embedding", "clip_mean", "clip_std")
    for name in begun_with_zeros:
        if getattr(model, name, None) is not None:
            torch.nn.init.normal_(getattr(model, name), mean=1.0 if name == "clip_std" else 0.0, std=0.2)
    return model


def unet_of_blocks(scale: int, *downs: str, layers: int = 1, **settings: Any) -> diffusers.UNet2DConditionModel:
    """Stable Diffusion's U-Net with these blocks on the way down, and their like on the way up."""
    return diffusers.UNet2DConditionModel(
        **{"cross_attention_dim": scale * CLIP_WIDTH, **settings},
        sample_size=LATENT_PIXELS,
        down_block_types=downs,
        up_block_types=tuple(down.replace("Down", "Up") for down in reversed(downs)),
        block_out_channels=(scale * 16, *[scale * 32] * (len(downs) - 1)),
        layers_per_block=layers,
        norm_num_groups=8,
        attention_head_dim=2 * scale,
    )


def speak_zeros(model: torch.nn.Module, std: float = 0.05) -> None:
    """Gives values to all that begins with nothing but zeros, or what is next to them, and is no bias."""
    for name, parameter in model.named_parameters():
        if not name.endswith("bias") and parameter.abs().max() < 1e-6:
            torch.nn.init.normal_(parameter, std=std)
