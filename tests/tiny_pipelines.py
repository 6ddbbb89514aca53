"""Tiny diffusers pipelines with seeded random weights, made from configurations alone (nothing is downloaded).

The models keep the shape of the real ones - repeated blocks to stream, autoencoders whose 64-pixel output spans
several 32-pixel tiles, text encoders of the right families - at widths that let a call run in a fraction of a second.
Text encoders and denoisers can be made `scale` times as wide, which takes scale² times the bytes.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DiffusionPipeline
from PIL import Image

Parts = dict[str, Any]

PIXELS = 64
LATENT_PIXELS = PIXELS // 4  # Every autoencoder here shrinks each side of a picture four times.
FRAMES = 9
TEXT_TOKENS = 16
CLIP_WIDTH = 16
T5_WIDTH = 2 * CLIP_WIDTH  # Stable Diffusion 3 pads two concatenated CLIP embeddings to the width of T5.

TRANSFORMER_WIDTH = 32
FLOW_VAE: Parts = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.36, "shift_factor": 0.12}


@dataclass(frozen=True)
class TinyCase:
    """A pipeline factory, which takes a scale, and the arguments for one short call, for pictures of a height."""

    name: str
    make: Callable[..., DiffusionPipeline]
    call: Callable[..., dict[str, Any]]


def run(pipe: Any, case: TinyCase, height: int = PIXELS) -> torch.Tensor:
    """Call the pipeline once and return its pictures or video as one float tensor."""
    pictures: torch.Tensor = pipe(**case.call(height))[0]
    return pictures.float()


def heads(scale: int = 1) -> Parts:
    """The size of a transformer's attention: what is wider has more heads, each as wide as before."""
    return {"num_attention_heads": 2 * scale, "attention_head_dim": TRANSFORMER_WIDTH // 2}


def clip_size(scale: int) -> Parts:
    width = scale * CLIP_WIDTH
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": width,
        "num_hidden_layers": 3,
        "num_attention_heads": 2 * scale,
    }


def _clip(scale: int = 1, suffix: str = "", *, projected: bool = False) -> Parts:
    """A CLIP text encoder and the tokenizer that spells for it, letter by letter."""
    letters = string.ascii_lowercase
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.CLIPTextConfig(**clip_size(scale), **special, vocab_size=len(tokenizer))
    model = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return {f"tokenizer{suffix}": tokenizer, f"text_encoder{suffix}": model(config)}


def _t5(scale: int = 1, suffix: str = "", *, family: str = "T5") -> Parts:
    """A text encoder of the T5 family and the tokenizer that spells for it, letter by letter."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [(letter, -2.0) for letter in f"\N{LOWER ONE EIGHTH BLOCK}{string.ascii_lowercase}"]
    tokenizer = transformers.T5Tokenizer(vocab=special + letters, extra_ids=0, model_max_length=2 * TEXT_TOKENS)
    width = scale * T5_WIDTH
    size: Parts = {"d_model": width, "d_kv": scale * 8, "d_ff": 2 * width, "num_layers": 3, "num_heads": 2}
    config_class, model = (getattr(transformers, family + kind) for kind in ("Config", "EncoderModel"))
    config = config_class(**size, vocab_size=len(tokenizer), feed_forward_proj="gated-gelu")
    return {f"tokenizer{suffix}": tokenizer, f"text_encoder{suffix}": model(config)}


def _vae_stages(down: str, up: str) -> Parts:
    """Three stages each way, with two halvings of the picture between them."""
    return {
        "down_block_types": (down,) * 3,
        "up_block_types": (up,) * 3,
        "block_out_channels": (8, 16, 16),
        "norm_num_groups": 4,
    }


def _image_vae(**settings: Any) -> diffusers.AutoencoderKL:
    """The autoencoder of the image pipelines, whose own tile size is 32 pixels."""
    stages = _vae_stages("DownEncoderBlock2D", "UpDecoderBlock2D")
    return diffusers.AutoencoderKL(**stages, sample_size=PIXELS // 2, **settings)


def _unet(scale: int = 1, **settings: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        sample_size=LATENT_PIXELS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=2 * scale,
        **settings,
    )


def _stable_diffusion(scale: int = 1, in_channels: int = 4) -> Parts:
    return {
        **_clip(scale),
        "vae": _image_vae(),
        "unet": _unet(scale, in_channels=in_channels, cross_attention_dim=scale * CLIP_WIDTH),
        "scheduler": diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def _stable_diffusion_xl(scale: int = 1) -> Parts:
    size_width = 8
    unet = _unet(
        scale,
        cross_attention_dim=scale * 2 * CLIP_WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=size_width,
        projection_class_embeddings_input_dim=6 * size_width + scale * CLIP_WIDTH,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
    )
    scheduler = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", steps_offset=1)
    text = {**_clip(scale), **_clip(scale, "_2", projected=True)}
    return {**text, "vae": _image_vae(), "unet": unet, "scheduler": scheduler, "add_watermarker": False}


def _stable_diffusion_3(scale: int = 1) -> Parts:
    transformer = diffusers.SD3Transformer2DModel(
        **heads(scale),
        sample_size=LATENT_PIXELS,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=scale * T5_WIDTH,
        caption_projection_dim=scale * TRANSFORMER_WIDTH,
        pooled_projection_dim=scale * 2 * CLIP_WIDTH,
        pos_embed_max_size=LATENT_PIXELS,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    text = {**_clip(scale, projected=True), **_clip(scale, "_2", projected=True), **_t5(scale, "_3")}
    return {**text, "vae": _image_vae(**FLOW_VAE), "transformer": transformer, "scheduler": scheduler}


def _flux(scale: int = 1) -> Parts:
    transformer = diffusers.FluxTransformer2DModel(
        **heads(scale),
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=scale * T5_WIDTH,
        pooled_projection_dim=scale * CLIP_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    text = {**_clip(scale), **_t5(scale, "_2")}
    return {**text, "vae": _image_vae(**FLOW_VAE), "transformer": transformer, "scheduler": scheduler}


def _cogvideox(scale: int = 1, in_channels: int = 4) -> Parts:
    """CogVideoX with tiles of 24 by 40 pixels, which its overlaps of a sixth and a fifth divide without rounding."""
    stages = _vae_stages("CogVideoXDownBlock3D", "CogVideoXUpBlock3D")
    vae = diffusers.AutoencoderKLCogVideoX(
        **stages, latent_channels=4, layers_per_block=1, sample_height=2 * 24, sample_width=2 * 40
    )
    transformer = diffusers.CogVideoXTransformer3DModel(
        **heads(scale),
        in_channels=in_channels,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=scale * T5_WIDTH,
        num_layers=3,
        sample_width=LATENT_PIXELS,
        sample_height=LATENT_PIXELS,
        sample_frames=FRAMES,
        max_text_seq_length=TEXT_TOKENS,
        use_rotary_positional_embeddings=True,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    return {**_t5(scale), "vae": vae, "transformer": transformer, "scheduler": scheduler}


def _wan(scale: int = 1, **settings: Any) -> Parts:
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True], scale_factor_spatial=4
    )
    width: Parts = {**heads(scale), "text_dim": scale * T5_WIDTH, "ffn_dim": scale * 64}
    size: Parts = {"freq_dim": 16, "num_layers": 3, "rope_max_seq_len": 32}
    transformer = diffusers.WanTransformer3DModel(**width, **size, **settings)
    scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3)
    return {**_t5(scale, family="UMT5"), "vae": vae, "transformer": transformer, "scheduler": scheduler}


def _wan_image_to_video(scale: int = 1) -> Parts:
    """Wan with mask and picture latents beside the noise, and a CLIP view of the picture beside the prompt."""
    view = PIXELS // 2
    clip = clip_size(scale)
    added_width = scale * TRANSFORMER_WIDTH
    return {
        **_wan(scale, in_channels=16 + 4 + 16, image_dim=clip["hidden_size"], added_kv_proj_dim=added_width),
        "image_encoder": transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**clip, image_size=view, patch_size=8)
        ),
        "image_processor": transformers.CLIPImageProcessorPil(
            size={"shortest_edge": view}, crop_size={"height": view, "width": view}
        ),
    }


def _ltx(scale: int = 1) -> Parts:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 16),
        down_block_types=("LTXVideoDownBlock3D",) * 3,
        layers_per_block=(1,) * 4,
        decoder_layers_per_block=(1,) * 4,
        spatio_temporal_scaling=(True, True, False),
        decoder_spatio_temporal_scaling=(True, True, False),
        patch_size=1,
    )
    size: Parts = {"in_channels": 8, "out_channels": 8, "num_layers": 3}
    transformer = diffusers.LTXVideoTransformer3DModel(
        **heads(scale), **size, cross_attention_dim=scale * TRANSFORMER_WIDTH, caption_channels=scale * T5_WIDTH
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {**_t5(scale), "vae": vae, "transformer": transformer, "scheduler": scheduler}


def _pictures(count: int, height: int) -> list[Image.Image]:
    """Pictures of seeded noise."""
    pixels = np.random.default_rng(2).integers(0, 256, (count, height, PIXELS, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in pixels]


def _picture(height: int) -> Parts:
    return {"image": _pictures(1, height)[0]}


def _clip_of_pictures(height: int) -> Parts:
    return {"video": _pictures(FRAMES, height)}


def _masked_picture(height: int) -> Parts:
    """A picture to repaint inside a central rectangle."""
    mask = Image.new("L", (PIXELS, height))
    mask.paste(255, (PIXELS // 4, height // 4, 3 * PIXELS // 4, 3 * height // 4))
    return {**_picture(height), "mask_image": mask}


def _no_picture(height: int) -> Parts:
    return {}


def _tiny(
    pipeline: str, parts: Callable[[int], Parts], inputs: Callable[[int], Parts] = _no_picture, **settings: Any
) -> TinyCase:
    """The case of one diffusers pipeline class, its components by their scale, and what to call it with."""

    def make(scale: int = 1) -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe: Any = getattr(diffusers, f"{pipeline}Pipeline")(**parts(scale))
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
        pipe.set_progress_bar_config(disable=True)
        return cast(DiffusionPipeline, pipe)

    def call(height: int = PIXELS) -> Parts:
        prompts = {"prompt": "a red fox", "negative_prompt": "blurry", "num_inference_steps": 2, "output_type": "pt"}
        size = {"height": height} if "height" in settings else {}
        return {**prompts, **settings, **size, **inputs(height), "generator": torch.Generator().manual_seed(1)}

    return TinyCase(pipeline, make, call)


PAIR: Parts = {"num_images_per_prompt": 2}
HALFWAY: Parts = {"num_inference_steps": 4, "strength": 0.5}  # Two steps, begun from the noised input.
SQUARE: Parts = {"height": PIXELS, "width": PIXELS}
T5_SQUARE: Parts = {**SQUARE, "max_sequence_length": TEXT_TOKENS}
CLIP_OF_FRAMES: Parts = {**T5_SQUARE, "num_frames": FRAMES}

CASES: tuple[TinyCase, ...] = (
    _tiny("StableDiffusion", _stable_diffusion, **SQUARE, **PAIR),
    _tiny("StableDiffusionImg2Img", _stable_diffusion, _picture, **HALFWAY),
    _tiny("StableDiffusionInpaint", partial(_stable_diffusion, in_channels=9), _masked_picture, **SQUARE),
    _tiny("StableDiffusionXL", _stable_diffusion_xl, **SQUARE, **PAIR),
    _tiny("StableDiffusionXLImg2Img", _stable_diffusion_xl, _picture, **HALFWAY),
    _tiny("StableDiffusion3", _stable_diffusion_3, **T5_SQUARE),
    _tiny("StableDiffusion3Img2Img", _stable_diffusion_3, _picture, **T5_SQUARE, **HALFWAY),
    _tiny("Flux", _flux, **T5_SQUARE, true_cfg_scale=2.0),
    _tiny("FluxImg2Img", _flux, _picture, **T5_SQUARE, **HALFWAY, true_cfg_scale=2.0),
    _tiny("CogVideoX", _cogvideox, **CLIP_OF_FRAMES),
    _tiny("CogVideoXImageToVideo", partial(_cogvideox, in_channels=8), _picture, **CLIP_OF_FRAMES),
    _tiny("CogVideoXVideoToVideo", _cogvideox, _clip_of_pictures, **T5_SQUARE, **HALFWAY),
    _tiny("Wan", _wan, **CLIP_OF_FRAMES),
    _tiny("WanImageToVideo", _wan_image_to_video, _picture, **CLIP_OF_FRAMES),
    _tiny("LTX", _ltx, **CLIP_OF_FRAMES),
    _tiny("LTXImageToVideo", _ltx, _picture, **CLIP_OF_FRAMES),
)
