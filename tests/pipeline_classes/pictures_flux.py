"""Recipes of Stable Diffusion 3, Flux and Chroma, in all their forms."""

from functools import partial
from typing import Any

import diffusers
import transformers
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder

from more_pipelines import _speak
from pipeline_classes.pictures_parts import _again, _case, _control_picture
from tiny_pipelines import (
    FLOW_VAE,
    HALFWAY,
    PIXELS,
    T5_SQUARE,
    T5_WIDTH,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _flux,
    _image_vae,
    _masked_picture,
    _picture,
    _pictures,
    _stable_diffusion_3,
    _t5,
    clip_size,
    heads,
)


def _stable_diffusion_3_inpaint(scale: int = 1) -> Parts:
    """The class asks for 16 channels of latents."""
    base = _stable_diffusion_3(scale)
    transformer = _again(base["transformer"], in_channels=16, out_channels=16)
    return {**base, "transformer": transformer, "vae": _image_vae(**FLOW_VAE, latent_channels=16)}


def _stable_diffusion_3_control(scale: int = 1, mask_channels: int = 0) -> Parts:
    base = _stable_diffusion_3(scale)
    net = diffusers.SD3ControlNetModel.from_transformer(
        base["transformer"], num_layers=2, num_extra_conditioning_channels=mask_channels
    )
    _speak(*net.controlnet_blocks, net.pos_embed_input)
    return {**base, "controlnet": net}


def _flux_with(scale: int = 1, **settings: Any) -> Parts:
    """Flux whose denoiser reads more than the noise, and predicts as much as before."""
    base = _flux(scale)
    return {**base, "transformer": _again(base["transformer"], **settings)}


def _flux_control_net(scale: int = 1) -> Parts:
    base = _flux(scale)
    net = diffusers.FluxControlNetModel.from_transformer(
        base["transformer"],
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=TRANSFORMER_WIDTH // 2,
        num_attention_heads=2 * scale,
    )
    _speak(*net.controlnet_blocks, *net.controlnet_single_blocks, net.controlnet_x_embedder)
    return {**base, "controlnet": net}


def _flux_redux(scale: int = 1) -> Parts:
    """Redux: what SigLIP sees in a picture, laid beside the prompt."""
    base = _flux(scale)
    text = {name: base[name] for name in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")}
    size = clip_size(scale)
    del size["projection_dim"]
    view = PIXELS // 2
    config = transformers.SiglipVisionConfig(**size, image_size=view, patch_size=8)
    return {
        **text,
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": view, "width": view}),
        "image_embedder": ReduxImageEncoder(redux_dim=size["hidden_size"], txt_in_features=scale * T5_WIDTH),
    }


def _chroma(scale: int = 1) -> Parts:
    transformer = diffusers.ChromaTransformer2DModel(
        **heads(scale),
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=scale * T5_WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=16,
        approximator_hidden_dim=scale * TRANSFORMER_WIDTH,
        approximator_layers=2,
    )
    transformer.register_to_config(guidance_embeds=False)  # Inpainting asks for it; the checkpoints name it.
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {**_t5(scale), "vae": _image_vae(**FLOW_VAE), "transformer": transformer, "scheduler": scheduler}


def _controlled_picture(height: int) -> Parts:
    return {**_picture(height), **_control_picture(height)}


def _controlled_mask(height: int) -> Parts:
    return {**_masked_picture(height), **_control_picture(height)}


def _control_mask(height: int) -> Parts:
    inputs = _masked_picture(height)
    return {"control_image": inputs["image"], "control_mask": inputs["mask_image"]}


def _kontext(height: int) -> Parts:
    """Kontext scales each picture to the area of those it was trained with, unless it is told otherwise."""
    return {**_picture(height), "max_area": height * PIXELS, "_auto_resize": False}


def _kontext_mask(height: int) -> Parts:
    return {**_masked_picture(height), "max_area": height * PIXELS, "_auto_resize": False}


def _seen_pictures(height: int) -> Parts:
    """Each picture is seen at one size: what is larger has more of them."""
    pictures = _pictures(height // 32, PIXELS)
    return {"image": pictures, "prompt": ["a red fox"] * len(pictures)}


CONTROL: Parts = {"in_channels": 32, "out_channels": 16}
FILL: Parts = {  # Noise, picture, and the sixteen pixels of the mask that one latent covers.
    "in_channels": 16 + 16 + 64,
    "out_channels": 16,
}

CASES: tuple[TinyCase, ...] = (
    _case("StableDiffusion3Inpaint", _stable_diffusion_3_inpaint, _masked_picture, **T5_SQUARE, **HALFWAY),
    _case("StableDiffusion3PAG", _stable_diffusion_3, **T5_SQUARE),
    _case("StableDiffusion3PAGImg2Img", _stable_diffusion_3, _picture, **T5_SQUARE, **HALFWAY),
    _case("StableDiffusion3ControlNet", _stable_diffusion_3_control, _control_picture, draws=True, **T5_SQUARE),
    _case(
        "StableDiffusion3ControlNetInpainting",
        partial(_stable_diffusion_3_control, mask_channels=1),
        _control_mask,
        draws=True,
        **T5_SQUARE,
    ),
    _case("FluxInpaint", _flux, _masked_picture, **T5_SQUARE, **HALFWAY, true_cfg_scale=2.0),
    _case("FluxFill", partial(_flux_with, **FILL), _masked_picture, **T5_SQUARE),
    _case("FluxControl", partial(_flux_with, **CONTROL), _control_picture, **T5_SQUARE),
    _case("FluxControlImg2Img", partial(_flux_with, **CONTROL), _controlled_picture, **T5_SQUARE, **HALFWAY),
    _case("FluxControlInpaint", partial(_flux_with, **CONTROL), _controlled_mask, **T5_SQUARE, **HALFWAY),
    _case("FluxControlNet", _flux_control_net, _control_picture, **T5_SQUARE, true_cfg_scale=2.0),
    _case("FluxControlNetImg2Img", _flux_control_net, _controlled_picture, **T5_SQUARE, **HALFWAY),
    _case("FluxControlNetInpaint", _flux_control_net, _controlled_mask, **T5_SQUARE, **HALFWAY),
    _case("FluxKontext", _flux, _kontext, **T5_SQUARE, true_cfg_scale=2.0),
    _case("FluxKontextInpaint", _flux, _kontext_mask, **T5_SQUARE, **HALFWAY, true_cfg_scale=2.0),
    _case("FluxPriorRedux", _flux_redux, _seen_pictures),
    _case("Chroma", _chroma, **T5_SQUARE),
    _case("ChromaImg2Img", _chroma, _picture, **T5_SQUARE, **HALFWAY),
    _case("ChromaInpaint", _chroma, _masked_picture, **T5_SQUARE, **HALFWAY),
)
OPTIONAL_PARTS: dict[str, str] = {}
