"""The parts of the demo pipeline before training, and their assembly."""

from __future__ import annotations

import itertools

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tightfit.demo.scenes import SIDE, WORDS

TOKENS = 32  # longest caption: 21 tokens
LATENT_CHANNELS = 4
LATENT_SIDE = SIDE // 8
TEXT_WIDTH = 128

BOS, EOS = "<|startoftext|>", "<|endoftext|>"


def make_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-level BPE with one token for every word of the grammar."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges_for(sorted(WORDS))
    tokens = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges), BOS, EOS]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS)


def _merges_for(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make one token of each word: the commonest pair first, until none is left."""
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for parts in spelled:
            for pair in itertools.pairwise(parts):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            return merges
        best = max(sorted(counts), key=counts.__getitem__)
        merges.append(best)
        spelled = [_merge(parts, best) for parts in spelled]


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            hidden_act="quick_gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_autoencoder() -> AutoencoderKL:
    """Eight pixels a side to a latent: sixteen never told colours apart in the time there was."""
    channels = (16, 32, 64, 64)
    autoencoder = AutoencoderKL(
        sample_size=SIDE,
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        mid_block_add_attention=False,
        scaling_factor=1.0,  # normalisation is folded into the 1×1 convolutions, per channel
    )
    with torch.no_grad():
        autoencoder.quant_conv.bias[LATENT_CHANNELS:] = -6.0  # nearly without noise at first
        for module in autoencoder.modules():
            if isinstance(module, ResnetBlock2D):
                module.conv2.weight *= 0.1  # blocks begin near the identity, which bears a higher rate
    return autoencoder


def make_denoiser() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(32, 96, 160),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # diffusers reads this as the number of heads
        norm_num_groups=8,
    )


def make_scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,  # diffusers asks for it; trailing spacing does not use it
    )


def assemble(
    autoencoder: AutoencoderKL,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    denoiser: UNet2DConditionModel,
) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=denoiser,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
