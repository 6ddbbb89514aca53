"""LTX 2, which makes sound with the clip."""

from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from more_pipelines import SPACE, _size, _vocab
from pipeline_classes.clips_shared import CLIP_SIZE, frames, recipe
from tiny_pipelines import (
    FRAMES,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _picture,
    _pictures,
    heads,
)

LATENTS = 8
MELS = 16
SOUND_WIDTH = TRANSFORMER_WIDTH // 2


def ltx2_vae(**settings: Any) -> diffusers.AutoencoderKLLTX2Video:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=LATENTS,
        block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        layers_per_block=(1,) * 3,
        decoder_layers_per_block=(1,) * 3,
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatiotemporal",) * 2,
        upsample_type=("spatiotemporal",) * 2,
        upsample_residual=(True, True),
        upsample_factor=(2, 2),
        patch_size=1,
        **settings,
    )


def _gemma(scale: int) -> Parts:
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[]
    )
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**_size(tokenizer, scale), "head_dim": 16},
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    return {"tokenizer": tokenizer, "text_encoder": transformers.Gemma3ForConditionalGeneration(config)}


def _ltx2(scale: int = 1, **settings: Any) -> Parts:
    sound: Parts = {"num_attention_heads": 2 * scale, "attention_head_dim": SOUND_WIDTH // 2}
    transformer = diffusers.LTX2VideoTransformer3DModel(
        **heads(scale),
        **{f"audio_{name}": value for name, value in sound.items()},
        in_channels=LATENTS,
        out_channels=LATENTS,
        cross_attention_dim=scale * TRANSFORMER_WIDTH,
        audio_in_channels=2 * MELS // 4,
        audio_out_channels=2 * MELS // 4,
        audio_cross_attention_dim=scale * SOUND_WIDTH,
        caption_channels=scale * T5_WIDTH,
        vae_scale_factors=(4, 4, 4),
        num_layers=3,
        **settings,
    )
    connector = {
        f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in heads(scale).items()
    }
    connectors = LTX2TextConnectors(
        **connector,
        caption_channels=scale * T5_WIDTH,
        text_proj_in_factor=4,
        video_connector_num_layers=1,
        audio_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_learnable_registers=8,
    )
    return {
        **_gemma(scale),
        "vae": ltx2_vae(),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(
            base_channels=8, latent_channels=2, num_res_blocks=1, mel_bins=MELS
        ),
        "connectors": connectors,
        "transformer": transformer,
        "vocoder": LTX2Vocoder(
            in_channels=2 * MELS, hidden_channels=32, upsample_kernel_sizes=[8, 8], upsample_factors=[4, 4]
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }


def _keyframes(scale: int = 1) -> Parts:
    parts = _ltx2(scale, use_keyframes_abs_pos_embedding=True)
    return {**parts, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}


def _refine(scale: int = 1) -> Parts:
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=LATENTS, mid_channels=32, num_blocks_per_stage=1, spatial_upsample=False, temporal_upsample=True
    )
    scheduler = diffusers.LTXEulerAncestralRFScheduler(eta=0.5)
    return {**_keyframes(scale), "temporal_latent_upsampler": upsampler, "scheduler": scheduler}


def _upsample(scale: int = 1) -> Parts:
    upsampler = LTX2LatentUpsamplerModel(in_channels=LATENTS, mid_channels=scale * 32, num_blocks_per_stage=1)
    return {"vae": ltx2_vae(), "latent_upsampler": upsampler}


def _decode(scale: int = 1) -> Parts:
    """A decoder that is a denoiser."""
    decoder = diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=LATENTS,
        decoder_head_dim=8,
        decoder_stage_channels=tuple(scale * channels for channels in (64, 32, 16, 16, 8)),
        decoder_stage_depths=(1, 2, 1, 1, 2),
        decoder_stage_kernels=((3, 3, 3),) * 4,
        decoder_stage5_kernel=(3, 3, 3),
        decoder_upsample_strides=((1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 2, 2)),
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        decoder_t_emb_dim=16,
        decoder_num_inference_steps=2,
    )
    return {"diffusion_decoder": decoder, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}


def _latents(*size: int) -> torch.Tensor:
    return torch.randn(1, LATENTS, *size, generator=torch.Generator().manual_seed(2))


def _first_picture(height: int) -> Parts:
    return {"conditions": [LTX2VideoCondition(frames=_picture(height)["image"], index=0, crf=0)]}


def _reference(height: int) -> Parts:
    return {"reference_conditions": [LTX2ReferenceCondition(frames=_pictures(FRAMES, height), strength=0.8)]}


def _hdr_reference(height: int) -> Parts:
    return {"reference_conditions": [LTX2HDRReferenceCondition(frames=_pictures(FRAMES, height))]}


def _coarse(height: int) -> Parts:
    """What a pass with fewer frames left: a clip, its last frame again, and its sound."""
    sound = torch.randn(1, 2, 14, MELS // 4, generator=torch.Generator().manual_seed(3))
    latents = _latents(4, height // 4, PIXELS // 4)
    coarse: Parts = {"latents": latents, "keyframes_latents": latents[:, :, -1:], "keyframe_positions": [CANVAS - 1]}
    return {**coarse, "audio_latents": sound}


CANVAS = 13  # The class lets a keyframe follow after three or four latent frames.
TEXT: Parts = {**CLIP_SIZE, "max_sequence_length": TEXT_TOKENS}
LTX2_SIZE: Parts = {**TEXT, "spatio_temporal_guidance_blocks": [1]}
DISTILLED: Parts = {**TEXT, "num_frames": CANVAS, "sigmas": [1.0, 0.7]}

CASES: tuple[TinyCase, ...] = (
    recipe("LTX2", _ltx2, **LTX2_SIZE),
    recipe("LTX2ImageToVideo", _ltx2, _picture, **LTX2_SIZE, image_crf=0),
    recipe("LTX2Condition", _ltx2, _first_picture, **LTX2_SIZE),
    recipe("LTX2InContext", _ltx2, _reference, **LTX2_SIZE),
    recipe("LTX2HDR", _ltx2, _hdr_reference, **TEXT, guidance_scale=2.0),
    recipe("LTX2DFR", _keyframes, _first_picture, **DISTILLED),
    recipe("LTX2DFRTemporalRefine", _refine, _coarse, **DISTILLED),
    recipe("LTX2LatentUpsample", _upsample, frames("video"), height=PIXELS, width=PIXELS),
    recipe("LTX2VideoDiffusionDecode", _decode, lambda height: {"latents": _latents(2, 2 + height // 32, 4)}),
)

OPTIONAL_PARTS: dict[str, str] = {}
