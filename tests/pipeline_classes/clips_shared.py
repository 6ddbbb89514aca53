"""What the recipes for clips and sound have in common."""

import inspect
import string
from collections.abc import Callable
from typing import Any, cast

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from tiny_pipelines import FRAMES, PIXELS, Parts, TinyCase, _no_picture, _pictures, clip_size

CLIP_SIZE: Parts = {"height": PIXELS, "width": PIXELS, "num_frames": FRAMES}
VIEW = PIXELS // 2
LETTERS_FOR_BLANKS = ("\u0120", "\u010a", "\N{LOWER ONE EIGHTH BLOCK}")


def speak(model: torch.nn.Module) -> None:
    """Gives values to weights that begin with zeros, and would pass for absent."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)


def recipe(
    name: str,
    parts: Callable[[int], Parts],
    inputs: Callable[[int], Parts] = _no_picture,
    pipeline: str | type[DiffusionPipeline] | None = None,
    attributes: Parts | None = None,
    **settings: Any,
) -> TinyCase:
    """A case whose call takes the usual prompts, steps and generator where the class knows them.

    `attributes` are lengths that the class writes down for its real models.
    """
    kind: Any = pipeline if isinstance(pipeline, type) else getattr(diffusers, f"{pipeline or name}Pipeline")

    def make(scale: int = 1) -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe: Any = kind(**parts(scale))
            for component in pipe.components.values():
                if isinstance(component, torch.nn.Module):
                    speak(component.eval())
        for attribute, value in (attributes or {}).items():
            assert hasattr(pipe, attribute)
            setattr(pipe, attribute, value)
        pipe.set_progress_bar_config(disable=True)
        return cast(DiffusionPipeline, pipe)

    def call(height: int = PIXELS) -> Parts:
        usual: Parts = {"prompt": "a red fox", "negative_prompt": "blurry", "num_inference_steps": 2}
        usual |= {"output_type": "pt", "generator": torch.Generator().manual_seed(1)}
        known = inspect.signature(kind.__call__).parameters
        size = {"height": height} if "height" in settings else {}
        return {**{key: value for key, value in usual.items() if key in known}, **settings, **size, **inputs(height)}

    return TinyCase(name, make, call)


def view(scale: int, *, projected: bool = False) -> Parts:
    """A CLIP that looks at a picture, and what cuts the picture to its size."""
    model = transformers.CLIPVisionModelWithProjection if projected else transformers.CLIPVisionModel
    return {
        "image_encoder": model(transformers.CLIPVisionConfig(**clip_size(scale), image_size=VIEW, patch_size=8)),
        "image_processor": transformers.CLIPImageProcessorPil(
            size={"shortest_edge": VIEW}, crop_size={"height": VIEW, "width": VIEW}
        ),
    }


def frames(name: str, count: int = FRAMES) -> Callable[[int], Parts]:
    """A clip of seeded noise, as the argument `name`."""
    return lambda height: {name: _pictures(count, height)}


def siglip(scale: int, names: tuple[str, str] = ("image_encoder", "feature_extractor")) -> Parts:
    """A SigLIP that looks at a picture: a token for each of 16 patches."""
    size = {name: value for name, value in clip_size(scale).items() if name != "projection_dim"}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**size, image_size=VIEW, patch_size=8))
    return {names[0]: model, names[1]: transformers.SiglipImageProcessorPil(size={"height": VIEW, "width": VIEW})}


def tokenizer_of(kind: str, *special: str, first: tuple[str, ...] = (), **settings: Any) -> Any:
    """A tokenizer of a family of language models, which spells, and knows what this pipeline says to its model."""
    vocab = {token: index for index, token in enumerate([*first, *special, *string.printable, *LETTERS_FOR_BLANKS])}
    tokenizer = getattr(transformers, f"{kind}Tokenizer")(vocab=vocab, merges=[], **settings)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer
