"""Pipelines without a prompt, of pictures' pixels or latents, and the first ones with one."""

from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

from pipeline_classes.unets_parts import STEPS, mask_of, recipe, unet_of_blocks
from tiny_pipelines import (
    CLIP_WIDTH,
    LATENT_PIXELS,
    PIXELS,
    SQUARE,
    Parts,
    TinyCase,
    _clip,
    _image_vae,
    _pictures,
    heads,
)


def _unet(scale: int, size: int = PIXELS // 2, channels: int = 3, **settings: Any) -> diffusers.UNet2DModel:
    return diffusers.UNet2DModel(
        **{"in_channels": channels, "out_channels": channels, **settings},
        sample_size=size,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=2,
        norm_num_groups=8,
        attention_head_dim=8,
    )


def _vqvae(stages: int = 3, **settings: Any) -> diffusers.VQModel:
    return diffusers.VQModel(
        latent_channels=3,
        num_vq_embeddings=64,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        block_out_channels=(8, 16, 16)[:stages],
        norm_num_groups=4,
        **settings,
    )


def _with(scheduler: str, size: int = PIXELS // 2, **settings: Any) -> Any:
    """A U-Net of pixels with one of the schedulers."""

    def make(scale: int = 1) -> Parts:
        return {"unet": _unet(scale, size), "scheduler": getattr(diffusers, scheduler)(**settings)}

    return make


def _consistency(scale: int = 1) -> Parts:
    unet = _unet(scale, num_class_embeds=10, resnet_time_scale_shift="scale_shift")
    return {"unet": unet, "scheduler": diffusers.CMStochasticIterativeScheduler()}


def _latent(scale: int = 1) -> Parts:
    return {"vqvae": _vqvae(), "unet": _unet(scale, LATENT_PIXELS), "scheduler": diffusers.DDIMScheduler()}


def _super_resolution(scale: int = 1) -> Parts:
    unet = _unet(scale, in_channels=6)
    return {"vqvae": _vqvae(2), "unet": unet, "scheduler": diffusers.DDIMScheduler(clip_sample=False)}


def _text_to_image(scale: int = 1) -> Parts:
    """With BERT, and an autoencoder as deep as the factor of eight that is written into the pipeline."""
    tokenizer = _clip()["tokenizer"]
    bert = LDMBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=77,
        encoder_layers=3,
        encoder_ffn_dim=scale * 2 * CLIP_WIDTH,
        encoder_attention_heads=2,
        head_dim=scale * 8,
        d_model=scale * CLIP_WIDTH,
        pad_token_id=tokenizer.pad_token_id,
    )
    stages: Parts = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4}
    stages |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return {
        "vqvae": diffusers.AutoencoderKL(**stages),
        "bert": LDMBertModel(bert),
        "tokenizer": tokenizer,
        "unet": unet_of_blocks(scale, "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", layers=2),
        "scheduler": diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False),
    }


def _dit(scale: int = 1) -> Parts:
    transformer = diffusers.DiTTransformer2DModel(
        **heads(2 * scale),
        in_channels=4,
        out_channels=8,
        num_layers=4,
        norm_num_groups=8,
        sample_size=LATENT_PIXELS,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    return {"transformer": transformer, "vae": _image_vae(), "scheduler": diffusers.DDIMScheduler()}


def _sound(scale: int = 1) -> Parts:
    unet = diffusers.UNet1DModel(
        sample_size=512,
        sample_rate=16000,
        in_channels=2,
        out_channels=2,
        extra_in_channels=scale * 32,
        time_embedding_type="fourier",
        flip_sin_to_cos=True,
        use_timestep_embedding=False,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
        block_out_channels=(scale * 16, scale * 32, scale * 32),
    )
    return {"unet": unet, "scheduler": diffusers.IPNDMScheduler()}


def _more(height: int) -> Parts:
    """Such pipelines make pictures of one size: more of them make the call larger."""
    return {"batch_size": max(1, height // 32)}


def _classes(height: int) -> Parts:
    return {"class_labels": list(range(1, max(1, height // 32) + 1))}


def _consistent(height: int) -> Parts:
    return {**_more(height), **_classes(height)}


def _longer(height: int) -> Parts:
    return {"audio_length_in_s": height / 2000}


def _holes(height: int) -> Parts:
    """A picture to fill where the mask is black."""
    mask = torch.from_numpy(np.array(mask_of(height // 2, PIXELS // 2)))[None, None] / 255.0
    return {"image": _pictures(1, height)[0].resize((PIXELS // 2, height // 2)), "mask_image": mask}


def _narrow(height: int) -> Parts:
    return {"image": _pictures(1, height)[0].resize((PIXELS // 2, height))}


NUMBERS: Parts = {**STEPS, "output_type": "np"}  # For pipelines that know of pictures and arrays only.

CASES: tuple[TinyCase, ...] = (
    recipe("DDPM", _with("DDPMScheduler"), _more, common=NUMBERS),
    recipe("DDIM", _with("DDIMScheduler"), _more, common=NUMBERS, eta=0.5),
    recipe("PNDM", _with("PNDMScheduler", LATENT_PIXELS), _more, common={**NUMBERS, "num_inference_steps": 4}),
    recipe("ConsistencyModel", _consistency, _consistent, common=STEPS),
    recipe("DiT", _dit, _classes, common=NUMBERS),
    recipe("LDM", _latent, _more, common=NUMBERS),
    recipe("LDMSuperResolution", _super_resolution, _narrow, common=NUMBERS),
    recipe("LDMTextToImage", _text_to_image, common=NUMBERS, prompt="a red fox", guidance_scale=4.0, **SQUARE),
    recipe("ScoreSdeVe", _with("ScoreSdeVeScheduler"), _more, common=NUMBERS),
    recipe("KarrasVe", _with("KarrasVeScheduler"), _more, common=NUMBERS),
    recipe("RePaint", _with("RePaintScheduler"), _holes, common=NUMBERS, jump_length=1, jump_n_sample=2),
    recipe("DanceDiffusion", _sound, _longer, common={"num_inference_steps": 2}),
)

OPTIONAL_PARTS: dict[str, str] = {}
