"""Every autoencoder of pictures and clips that diffusers exports, tiny, with seeded random weights.

Each keeps the shape of the published one: three levels or more, two resnets a block, attention in the middle, the
caches and segments of frames. Only the channels are few: multiples of 32 where a class fixes 32 groups for its norms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import diffusers
import torch
from torch import nn

Settings = dict[str, Any]

COLUMNS = 5  # The width of the latents, like no height that is a multiple of 2, 3 or 4.


@dataclass(frozen=True)
class TinyAutoencoder:
    """An autoencoder factory, and what to decode and encode.

    `latents(rows, batch)` are `rows` positions high and COLUMNS wide, `pixels(rows, batch)` is the picture or clip of
    that size (`columns` and `seed` may follow), and `decode_kwargs(batch)` goes with the latents into `decode`. `rows`
    may be any multiple of `granule` from `least_rows` on, or `only_rows` where that is given: then the latents are
    square.
    """

    name: str
    make: Callable[[], nn.Module]
    latents: Callable[..., torch.Tensor]
    pixels: Callable[..., torch.Tensor]
    decode_kwargs: Callable[[int], Settings]
    granule: int = 1
    least_rows: int = 1
    only_rows: int | None = None
    encodes: bool = True
    draws_noise: bool = False  # decode() asks torch's own generator for noise: seed it before each call
    large: bool = False  # of the published size: slow on a CPU


def decode(model: nn.Module, case: TinyAutoencoder, latents: torch.Tensor, batch: int) -> torch.Tensor:
    """The picture or clip that `case.latents(…, batch)` stand for."""
    settings = {
        key: value.to(latents.dtype) if isinstance(value, torch.Tensor) else value
        for key, value in case.decode_kwargs(batch).items()
    }
    with torch.inference_mode():
        decoded = cast(Any, model).decode(latents, **settings)
    return cast(torch.Tensor, getattr(decoded, "sample", decoded))


def encode(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The latents of a picture or clip: where they are a distribution, its mode."""
    with torch.inference_mode():
        encoded = cast(Any, model).encode(pixels)
    if hasattr(encoded, "latent_dist"):
        return cast(torch.Tensor, encoded.latent_dist.mode())
    return cast(torch.Tensor, encoded.latents if hasattr(encoded, "latents") else encoded.latent)


def _vary(model: nn.Module) -> None:
    """Make every weight of a fresh model matter to what comes out.

    Scales of norms are all one and their biases and many gates all zero: they get values of their own. The weights of
    a layer, which torch draws with a variance of 1/3 per input, keep that of what goes through once they are √3 times
    as large; without, attention would hardly look at one position more than at another.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if (parameter == 1).all():
                parameter.uniform_(0.8, 1.2)
            elif (parameter == 0).all():
                parameter.uniform_(-0.2, 0.2)
            elif parameter.ndim > 1:
                parameter.mul_(3**0.5)


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tiny(
    name: str,
    settings: Settings,
    *,
    ratio: int,
    channels: int = 4,
    frames: tuple[int, int] | None = None,
    pixel_channels: int = 3,
    stacked: int = 1,
    prepare: Callable[[Any], object] = lambda model: None,
    decode_kwargs: Callable[[int], Settings] = lambda batch: {},
    **rest: Any,
) -> TinyAutoencoder:
    """The case of one diffusers class, `name` up to a space, that shrinks each side of a picture `ratio` times.

    `channels` are those of the latents. `frames` are the latents in time and the pictures that they encode, None for a
    class whose tensors have no time; `stacked` frames of each clip then stand in the batch. `prepare` gets the model,
    `rest` are fields of the case.
    """

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = getattr(diffusers, name.partition(" ")[0])(**settings)
            _vary(model)
        prepare(model)
        return model.eval()

    latent_frames, pixel_frames = ((frames[0],), (frames[1],)) if frames else ((), ())

    def size(rows: int, columns: int) -> tuple[int, int]:
        return rows, rows if rest.get("only_rows") else columns

    def latents(rows: int, batch: int, columns: int = COLUMNS, seed: int = 1) -> torch.Tensor:
        return _noise(seed, batch * stacked, channels, *latent_frames, *size(rows, columns))

    def pixels(rows: int, batch: int, columns: int = COLUMNS, seed: int = 1) -> torch.Tensor:
        height, width = (side * ratio for side in size(rows, columns))
        return _noise(seed, batch * stacked, pixel_channels, *pixel_frames, height, width).clamp(-1, 1)

    return TinyAutoencoder(name, make, latents, pixels, decode_kwargs, **rest)


def _generator(batch: int) -> Settings:
    return {"generator": torch.Generator().manual_seed(2)}


def _stages(down: str, up: str, widths: tuple[int, ...] = (8, 16, 16), groups: int = 4) -> Settings:
    """One block a width, two resnets in each, and a halving of the picture between any two."""
    return {
        "down_block_types": (down,) * len(widths),
        "up_block_types": (up,) * len(widths),
        "block_out_channels": widths,
        "layers_per_block": 2,
        "norm_num_groups": groups,
        "latent_channels": 4,
    }


def _small_tiles(model: Any) -> None:
    """Tiles of 2 by 4 by 5 latents, each half over the last in time and height: the class knows whole tiles only."""
    model.enable_tiling()
    model.enable_slicing()  # It has room for the tiles of one clip.
    model.kernel, model.stride = (8, 16, 20), (4, 8, 20)
    model.tile_overlap_t, model.tile_overlap_h, model.tile_overlap_w = 4, 8, 0


def _one_at_a_time(model: Any) -> None:
    """The clips of a batch one by one: the mask of the attention fits no more."""
    model.enable_slicing()


IMAGE_STAGES = _stages("DownEncoderBlock2D", "UpDecoderBlock2D")
SHARED_WIDTHS: Settings = {"latent_channels": 4, "block_out_channels": (8, 16, 16), "layers_per_block": 2}
HUNYUAN: Settings = {**SHARED_WIDTHS, "spatial_compression_ratio": 4}

LATENT_STATISTICS: Settings = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
WAN: Settings = {"base_dim": 8, "z_dim": 4, **LATENT_STATISTICS}
WAN_2_1: Settings = {**WAN, "dim_mult": [1, 2, 2, 2], "temperal_downsample": [False, True, True]}
WAN_2_2: Settings = {
    **WAN,
    "decoder_base_dim": 12,
    "dim_mult": [1, 2, 2],
    "temperal_downsample": [True, True],
    "is_residual": True,
    "scale_factor_spatial": 8,
}

LTX: Settings = {
    "latent_channels": 8,
    "block_out_channels": (8, 16, 16),
    "down_block_types": ("LTXVideoDownBlock3D",) * 3,
    "layers_per_block": (2,) * 4,
    "spatio_temporal_scaling": (True, True, False),
    "downsample_type": ("conv",) * 3,
    "patch_size": 2,
}
LTX_DECODER_0_9_1: Settings = {
    "decoder_block_out_channels": (16, 32),
    "decoder_layers_per_block": (2,) * 3,
    "decoder_spatio_temporal_scaling": (True,) * 2,
    "decoder_inject_noise": (False,) * 3,
    "upsample_residual": (True,) * 2,
    "upsample_factor": (2,) * 2,
}

CASES: tuple[TinyAutoencoder, ...] = (
    _tiny("AutoencoderKL", IMAGE_STAGES, ratio=4),
    _tiny(
        "AutoencoderKL without attention",
        {**IMAGE_STAGES, "mid_block_add_attention": False, "use_quant_conv": False, "use_post_quant_conv": False},
        ratio=4,
    ),
    _tiny(
        "AutoencoderKL of Stable Diffusion",
        _stages("DownEncoderBlock2D", "UpDecoderBlock2D", widths=(128, 256, 512, 512), groups=32),
        ratio=8,
        large=True,
    ),
    _tiny(
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "down_block_out_channels": (8, 16, 16),
            "layers_per_down_block": 2,
            "up_block_types": ("UpDecoderBlock2D",) * 3,
            "up_block_out_channels": (8, 16, 24),
            "layers_per_up_block": 3,
            "norm_num_groups": 4,
        },
        ratio=4,
    ),
    _tiny(
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 16, 16),
            "decoder_block_out_channels": (8, 16, 16),
            "encoder_layers_per_block": (2,) * 3,
            "decoder_layers_per_block": (2,) * 3,
            "encoder_qkv_multiscales": ((), (), (5,)),
            "decoder_qkv_multiscales": ((), (), (5,)),
            "upsample_block_type": "interpolate",
            "downsample_block_type": "Conv",
        },
        ratio=4,
    ),
    _tiny(
        "AutoencoderKLAllegro",
        {
            **_stages("AllegroDownBlock3D", "AllegroUpBlock3D"),
            "temporal_downsample_blocks": (True, True, False),
            "temporal_upsample_blocks": (True, True, False),
        },
        ratio=4,
        frames=(3, 12),  # Decoded, the frames come before the channels.
        prepare=_small_tiles,
        granule=2,
        least_rows=4,
    ),
    _tiny(
        "AutoencoderKLCogVideoX",
        _stages("CogVideoXDownBlock3D", "CogVideoXUpBlock3D"),
        ratio=4,
        frames=(5, 17),  # Decoded in two batches.
    ),
    _tiny(
        "AutoencoderKLCosmos",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8, 16, 16),
            "decode_block_out_channels": (8, 8, 16, 16),
            "patch_size": 2,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
            "latents_mean": None,
            "latents_std": None,
        },
        ratio=4,
        frames=(3, 9),
    ),
    _tiny("AutoencoderKLFlux2", IMAGE_STAGES, ratio=4),
    _tiny(
        "AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32, 64, 64),
            "layers_per_block": 2,
            "spatial_compression_ratio": 4,
            "sample_size": 64,
        },
        ratio=4,
    ),
    _tiny("AutoencoderKLHunyuanImageRefiner", HUNYUAN, ratio=4, frames=(3, 3)),
    _tiny(
        "AutoencoderKLHunyuanVideo",
        {**_stages("HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D"), "spatial_compression_ratio": 4},
        ratio=4,
        frames=(6, 21),  # More than 4 latents in time, which the class takes in overlapping pieces of its own.
    ),
    _tiny("AutoencoderKLHunyuanVideo15", HUNYUAN, ratio=4, frames=(3, 9), prepare=_one_at_a_time),
    _tiny("AutoencoderKLKVAE", {"channels": 32, "z_channels": 4, "ch_mult": (1, 2, 2)}, ratio=4),
    _tiny(
        "AutoencoderKLKVAEVideo",
        {"ch": 32, "z_channels": 4, "ch_mult": (1, 1, 1)},
        ratio=4,
        frames=(7, 25),  # Two segments.
    ),
    _tiny(
        "AutoencoderKLLTXVideo",
        {
            **LTX,
            "decoder_block_out_channels": (8, 16, 16),
            "decoder_layers_per_block": (2,) * 4,
            "decoder_spatio_temporal_scaling": (True, True, False),
            "decoder_inject_noise": (False,) * 4,
            "upsample_residual": (False,) * 3,
            "upsample_factor": (1,) * 3,
        },
        channels=8,
        ratio=8,
        frames=(3, 9),
    ),
    _tiny(
        "AutoencoderKLLTXVideo of 0.9.1",
        {
            **LTX,
            **LTX_DECODER_0_9_1,
            "decoder_inject_noise": (True, True, False),
            "timestep_conditioning": True,
        },
        channels=8,
        ratio=8,
        frames=(3, 9),
        decode_kwargs=lambda batch: {"temb": torch.full((batch,), 0.05)},
        draws_noise=True,
    ),
    _tiny(
        "AutoencoderKLLTXVideo of 0.9.5",
        {
            **LTX,
            **LTX_DECODER_0_9_1,
            "block_out_channels": (8, 16, 16, 32),
            "down_block_types": ("LTXVideo095DownBlock3D",) * 3,
            "layers_per_block": (2,) * 4,
            "spatio_temporal_scaling": (True,) * 3,
            "downsample_type": ("spatial", "temporal", "spatiotemporal"),
            "timestep_conditioning": True,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
        },
        channels=8,
        ratio=8,
        frames=(3, 9),
        decode_kwargs=lambda batch: {"temb": torch.full((batch,), 0.05)},
    ),
    _tiny(
        "AutoencoderKLLTX2Video",
        {
            "latent_channels": 8,
            "block_out_channels": (16, 16, 32),
            "down_block_types": ("LTX2VideoDownBlock3D",) * 3,
            "decoder_block_out_channels": (16, 32),
            "layers_per_block": (2,) * 4,
            "decoder_layers_per_block": (2,) * 3,
            "spatio_temporal_scaling": (True,) * 3,
            "decoder_spatio_temporal_scaling": (True,) * 2,
            "decoder_inject_noise": (False,) * 3,
            "downsample_type": ("spatial", "temporal", "spatiotemporal"),
            "upsample_type": ("spatiotemporal",) * 2,
            "upsample_residual": (True,) * 2,
            "upsample_factor": (2,) * 2,
            "patch_size": 2,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
        },
        channels=8,
        ratio=8,
        frames=(3, 9),
        least_rows=2,
    ),
    _tiny(
        "AutoencoderKLMagvit",
        {
            **SHARED_WIDTHS,
            "block_out_channels": (8, 16, 16, 16),
            "down_block_types": ("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
            "up_block_types": ("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
            "norm_num_groups": 4,
        },
        ratio=8,
        frames=(3, 9),
    ),
    _tiny(
        "AutoencoderKLMiniMaxH3",
        {
            **SHARED_WIDTHS,
            **LATENT_STATISTICS,
            "spatial_downsample_factors": (2, 2, 1),
            "temporal_downsample_factors": (2, 2, 1),
            "norm_num_groups": 4,
            "decoder_num_layers": 3,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
            "clip_length": 5,
            "token_drop": 1,
        },
        ratio=4,
        frames=(5, 11),  # Three clips, of which each one fades into the next.
        least_rows=2,
    ),
    _tiny(
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": (32, 32, 64),
            "decoder_block_out_channels": (32, 32, 64),
            "latent_channels": 4,
            "layers_per_block": (2,) * 4,
            "temporal_expansions": (1, 2),
            "spatial_expansions": (2, 2),
            "add_attention_block": (False, True, True, True),
            "latents_mean": (0.0,) * 4,
            "latents_std": (1.0,) * 4,
        },
        ratio=4,
        frames=(3, 5),
    ),
    _tiny("AutoencoderKLQwenImage", WAN_2_1, ratio=8, frames=(3, 9)),
    _tiny(
        "AutoencoderKLQwenImage21",
        {**WAN_2_2, "in_channels": 4, "out_channels": 4},
        ratio=4,
        frames=(1, 1),
        pixel_channels=4,
    ),
    _tiny(
        "AutoencoderKLTemporalDecoder",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "block_out_channels": (32, 64, 64),
            "layers_per_block": 2,
        },
        ratio=4,
        stacked=3,
        decode_kwargs=lambda batch: {"num_frames": 3},
    ),
    _tiny("AutoencoderKLWan", WAN_2_1, ratio=8, frames=(3, 9)),
    _tiny(
        "AutoencoderKLWan of 2.2",
        {**WAN_2_2, "in_channels": 12, "out_channels": 12, "patch_size": 2},
        ratio=8,
        frames=(3, 9),
    ),
    _tiny(
        "AutoencoderRAE",
        {
            "encoder_hidden_size": 64,
            "encoder_patch_size": 4,
            "encoder_num_hidden_layers": 2,
            "encoder_input_size": 16,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 3,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 64,
            "patch_size": 4,
        },
        channels=64,
        ratio=4,
        only_rows=4,
    ),
    _tiny(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4},
        ratio=8,
    ),
    _tiny(
        "AutoencoderVidTok",
        {"ch": 8, "ch_mult": [1, 2, 2, 2]},
        ratio=8,
        frames=(3, 12),  # It decodes the last 9.
    ),
    _tiny(
        "ConsistencyDecoderVAE",
        {
            "encoder_block_out_channels": (8, 16, 16),
            "encoder_down_block_types": ("DownEncoderBlock2D",) * 3,
            "encoder_norm_num_groups": 4,
            "decoder_block_out_channels": (8, 16, 16),
            "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 3,
            "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 3,
            "decoder_layers_per_block": 2,
            "decoder_norm_num_groups": 4,
        },
        ratio=4,
        decode_kwargs=_generator,
    ),
    _tiny(
        "Kandinsky6SRVAE",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8, 16, 16),
            "decoder_block_out_channels": (8, 8, 16, 16),
        },
        ratio=8,
        frames=(6, 21),  # Two segments.
    ),
    _tiny(
        "LTX2VideoDiffusionDecoderModel",
        {
            "latent_channels": 8,
            "patch_size": 4,
            "decoder_head_dim": 8,
            "decoder_stage_channels": (32, 16, 16),
            "decoder_stage_depths": (2, 2, 2),
            "decoder_stage_kernels": ((3, 3, 3), (3, 3, 3)),
            "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1)),
            "decoder_upsample_channel_reductions": (2, 1),
            "decoder_stage5_kernel": (3, 5, 5),
            "decoder_t_emb_dim": 16,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 2,
        },
        channels=8,
        ratio=8,
        frames=(2, 3),
        decode_kwargs=_generator,
        least_rows=3,  # A neighbourhood.
        encodes=False,
    ),
    _tiny("VQModel", {**IMAGE_STAGES, "num_vq_embeddings": 32}, ratio=4),
)

AUDIO = "makes sound, not pictures"
OPTIONAL_PARTS: dict[str, str] = {
    "AutoencoderKLKVAEAudio": AUDIO,
    "AutoencoderKLLTX2Audio": AUDIO,
    "AutoencoderKLMiniMaxH3Audio": AUDIO,
    "AutoencoderOobleck": AUDIO,
    "AutoencoderSAME": AUDIO,
    "Cosmos3AVAEAudioTokenizer": AUDIO,
    "LongCatAudioDiTVae": AUDIO,
    "MMAudioVAE": AUDIO,
    "RFD4ProteinaAutoencoder": "makes proteins, not pictures",
}
