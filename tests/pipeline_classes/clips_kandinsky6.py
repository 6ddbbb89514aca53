"""Kandinsky 6: a clip with sound, and a clip made larger."""

import diffusers

from pipeline_classes.clips_hunyuan import LATENTS, hunyuan_vae
from pipeline_classes.clips_kandinsky import AXES, _qwen
from pipeline_classes.clips_shared import CLIP_SIZE, frames, recipe
from tiny_pipelines import (
    CLIP_WIDTH,
    PIXELS,
    T5_WIDTH,
    TEXT_TOKENS,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _clip,
    _picture,
)

MELS = 16
SOUND_LATENTS = 4
SOUND_RATE = 1600


def _kandinsky_6(scale: int = 1) -> Parts:
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=LATENTS,
        out_visual_dim=LATENTS,
        in_text_dim=scale * T5_WIDTH,
        in_text_dim2=scale * CLIP_WIDTH,
        time_dim=16,
        model_dim=scale * TRANSFORMER_WIDTH,
        ff_dim=scale * 64,
        num_text_blocks=1,
        num_visual_blocks=3,
        axes_dims=AXES,
        in_audio_dim=SOUND_LATENTS,
        out_audio_dim=SOUND_LATENTS,
        visual_token_type_num_embeddings=2,
    )
    audio_vae = diffusers.MMAudioVAE(
        mel_bins=MELS,
        latent_channels=SOUND_LATENTS,
        hidden_channels=16,
        layers_per_block=1,
        sample_rate=SOUND_RATE,
        n_fft=64,
        hop_length=16,
    )
    vocoder = diffusers.MMAudioVocoder(
        num_mels=MELS, upsample_initial_channel=16, upsample_rates=(4, 4), upsample_kernel_sizes=(8, 8)
    )
    return {
        **_qwen(scale),
        **_clip(scale, "_2"),
        "vae": hunyuan_vae(),
        "transformer": transformer,
        "audio_vae": audio_vae,
        "vocoder": vocoder,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    }


def _larger(scale: int = 1) -> Parts:
    latents = 8
    vae = diffusers.Kandinsky6SRVAE(
        latent_channels=latents,
        encoder_block_out_channels=(8, 8, 16, 16),
        decoder_block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
    )
    transformer = diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=latents,
        out_visual_dim=latents,
        time_dim=16,
        model_dim=scale * TRANSFORMER_WIDTH,
        ff_dim=scale * 64,
        num_visual_blocks=3,
        axes_dims=AXES,
        nabla_window=(3, 3, 3),
        tile_sizes=((PIXELS, PIXELS),),
    )
    upscaler = diffusers.Kandinsky6SRLatentUpscalerBank(
        in_channels=latents,
        stage_channels=(32, 16, 16),
        num_pre_blocks=1,
        num_mid_blocks=1,
        num_post_blocks=1,
        num_x2_adapter_blocks=1,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return {"vae": vae, "transformer": transformer, "latent_upscaler": upscaler, "scheduler": scheduler}


CASES: tuple[TinyCase, ...] = (
    recipe("Kandinsky6TI2VA", _kandinsky_6, _picture, **CLIP_SIZE, max_sequence_length=TEXT_TOKENS),
    recipe("Kandinsky6SR", _larger, frames("video", 5), resolution_scale=2),
)

OPTIONAL_PARTS: dict[str, str] = {}
