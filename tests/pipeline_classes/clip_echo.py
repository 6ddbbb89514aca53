"""The recipe of Echo, which makes clips with sound that remember pictures."""

from typing import Any

import diffusers
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from more_pipelines import SPACE, _size, _vocab
from pipeline_classes.pictures_modular import _modular
from tiny_pipelines import FRAMES, SQUARE, T5_WIDTH, TRANSFORMER_WIDTH, Parts, TinyCase, _pictures, heads

LATENTS = 8
MELS = 16
SOUND = 2 * MELS // 4  # numbers for each moment of sound


def _vae() -> Any:
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
    )


def _text(scale: int) -> Parts:
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[]
    )
    config = transformers.Gemma2Config(**_size(tokenizer, scale), head_dim=16)
    width = heads(scale)
    connectors = LTX2TextConnectors(
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in width.items()},
        **{f"{kind}_connector_num_layers": 1 for kind in ("video", "audio")},
        **{f"{kind}_connector_num_learnable_registers": 8 for kind in ("video", "audio")},
        caption_channels=scale * T5_WIDTH,
        text_proj_in_factor=4,
    )
    return {"tokenizer": tokenizer, "text_encoder": transformers.Gemma2Model(config), "connectors": connectors}


def _echo(scale: int = 1) -> Parts:
    """Echo's denoiser is LTX 2's, its words come through connectors of their own, its sound out of a vocoder."""
    transformer = diffusers.LTX2VideoTransformer3DModel(
        **heads(scale),
        audio_num_attention_heads=2 * scale,
        audio_attention_head_dim=TRANSFORMER_WIDTH // 4,
        in_channels=LATENTS,
        out_channels=LATENTS,
        cross_attention_dim=scale * TRANSFORMER_WIDTH,
        audio_in_channels=SOUND,
        audio_out_channels=SOUND,
        audio_cross_attention_dim=scale * TRANSFORMER_WIDTH // 2,
        caption_channels=scale * T5_WIDTH,
        vae_scale_factors=(4, 4, 4),
        num_layers=3,
    )
    return {
        **_text(scale),
        "vae": _vae(),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(
            base_channels=8, latent_channels=2, num_res_blocks=1, mel_bins=MELS
        ),
        "transformer": transformer,
        "vocoder": LTX2Vocoder(
            in_channels=2 * MELS, hidden_channels=32, upsample_kernel_sizes=[8, 8], upsample_factors=[4, 4]
        ),
    }


def _remembered(height: int) -> Parts:
    return {"memory_images": _pictures(1, height), "sigmas": [1.0, 0.5, 0.0]}


CASES: tuple[TinyCase, ...] = (
    _modular("EchoModular", _echo, _remembered, **SQUARE, num_frames=FRAMES, max_sequence_length=16, output="videos"),
)
OPTIONAL_PARTS: dict[str, str] = {}
