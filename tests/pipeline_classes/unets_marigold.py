"""Stable Diffusion that says what it sees, varies a picture by another, or takes few steps."""

import diffusers
from diffusers.pipelines.deprecated.paint_by_example.image_encoder import PaintByExampleImageEncoder

from pipeline_classes.unets_parts import STEPS, joined, mask_of, picture_as, recipe, vision, without
from tiny_pipelines import CLIP_WIDTH, HALFWAY, SQUARE, Parts, TinyCase, _picture, _stable_diffusion, _unet


def _seeing(scale: int = 1, latents: int = 1) -> Parts:
    """A picture's latents beside those of what is seen in it."""
    parts = without(
        _stable_diffusion(scale, 4), "safety_checker", "feature_extractor", "requires_safety_checker", "unet"
    )
    unet = _unet(scale, in_channels=4 + 4 * latents, out_channels=4 * latents, cross_attention_dim=scale * CLIP_WIDTH)
    return {**parts, "unet": unet, "default_denoising_steps": 2, "default_processing_resolution": 0}


def _depth(scale: int = 1) -> Parts:
    return {**_seeing(scale), "prediction_type": "depth", "scale_invariant": True, "shift_invariant": True}


def _normals(scale: int = 1) -> Parts:
    return {**_seeing(scale), "prediction_type": "normals", "use_full_z_range": True}


def _intrinsics(scale: int = 1) -> Parts:
    properties = {
        "target_names": ["albedo", "roughness"],
        "albedo": {"prediction_space": "srgb", "up_to_scale": False},
        "roughness": {"prediction_space": "linear", "up_to_scale": False},
    }
    return {**_seeing(scale, 2), "prediction_type": "intrinsics", "target_properties": properties}


def _consistent(scale: int = 1) -> Parts:
    unet = _unet(scale, cross_attention_dim=scale * CLIP_WIDTH, time_cond_proj_dim=16)
    scheduler = diffusers.LCMScheduler(beta_schedule="scaled_linear")
    return {**_stable_diffusion(scale), "unet": unet, "scheduler": scheduler}


def _by_example(scale: int = 1) -> Parts:
    images = vision(scale)
    encoder = PaintByExampleImageEncoder(images["image_encoder"].config, proj_size=scale * CLIP_WIDTH)
    parts = without(_stable_diffusion(scale, 9), "tokenizer", "text_encoder")
    return {**parts, **images, "image_encoder": encoder}


def _example(height: int) -> Parts:
    return {"mask_image": mask_of(height)}


EXAMPLE = joined(_picture, _example, picture_as("example_image", 1))
SEEN: Parts = {"num_inference_steps": 2, "output_type": "pt"}
FEW: Parts = {"prompt": "a red fox", **STEPS}

CASES: tuple[TinyCase, ...] = (
    recipe("MarigoldDepth", _depth, _picture, common=SEEN, ensemble_size=3, output_uncertainty=True),
    recipe("MarigoldNormals", _normals, _picture, common=SEEN, ensemble_size=3, output_uncertainty=True),
    recipe("MarigoldIntrinsics", _intrinsics, _picture, common=SEEN, ensemble_size=3, output_uncertainty=True),
    recipe("LatentConsistencyModel", _consistent, common=FEW, **SQUARE),
    recipe("LatentConsistencyModelImg2Img", _consistent, _picture, common=FEW, **HALFWAY),
    recipe(
        "PaintByExample",
        _by_example,
        joined(_picture, _example, picture_as("example_image", 1)),
        common=STEPS,
        **SQUARE,
    ),
)

OPTIONAL_PARTS: dict[str, str] = {}
