"""LTX 2 and 2.5 made of blocks; in 2.5 the decoder is a denoiser."""

import diffusers

from pipeline_classes.clips_ltx2 import LATENTS, TEXT, _ltx2
from pipeline_classes.clips_modular import modular
from tiny_pipelines import Parts, TinyCase, _picture


def _guided(scale: int = 1) -> Parts:
    settings: Parts = {"stg_scale": 1.0, "guidance_rescale": 0.7, "spatio_temporal_guidance_blocks": [1]}
    guiders: Parts = {
        "guider": diffusers.LTX2Guidance(guidance_scale=3.0, modality_scale=3.0, **settings),
        "audio_guider": diffusers.LTX2Guidance(guidance_scale=7.0, modality_scale=3.0, **settings),
    }
    return {**_ltx2(scale), **guiders}


def _denoised(scale: int = 1) -> Parts:
    """Four pixels and four frames for each latent, as in the other decoder."""
    decoder = diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=LATENTS,
        decoder_head_dim=8,
        decoder_stage_channels=(64, 32, 16, 16, 8),
        decoder_stage_depths=(1, 1, 1, 1, 1),
        decoder_stage_kernels=((3, 3, 3),) * 4,
        decoder_stage5_kernel=(3, 3, 3),
        decoder_upsample_strides=((1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1)),
        decoder_t_emb_dim=16,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    return {**_guided(scale), "diffusion_decoder": decoder}


BOTH = ["videos", "audio"]

CASES: tuple[TinyCase, ...] = (
    modular("LTX2Modular", _guided, _picture, BOTH, **TEXT, image_crf=0),
    modular("LTX25Modular", _denoised, output=BOTH, **{**TEXT, "num_frames": 5}),
)

OPTIONAL_PARTS: dict[str, str] = {}
