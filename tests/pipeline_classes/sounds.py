"""Sound: LongCat, Stable Audio, ACE-Step."""

from collections.abc import Callable

import diffusers
import torch
import transformers
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder

from more_pipelines import SPACE, _size, _vocab
from pipeline_classes.clips_shared import recipe, tokenizer_of
from tiny_pipelines import PIXELS, T5_WIDTH, TEXT_TOKENS, TRANSFORMER_WIDTH, Parts, TinyCase, _t5, heads

RATE = 800
LATENTS = 8


def _longcat(scale: int = 1) -> Parts:
    vae = diffusers.LongCatAudioDiTVae(
        channels=8,
        c_mults=[1, 2, 2],
        strides=[2, 4, 4],
        latent_dim=LATENTS,
        encoder_latent_dim=2 * LATENTS,
        downsampling_ratio=32,
        sample_rate=RATE,
    )
    transformer = diffusers.LongCatAudioDiTTransformer(
        dit_dim=scale * TRANSFORMER_WIDTH,
        dit_depth=3,
        dit_heads=2 * scale,
        dit_text_dim=scale * T5_WIDTH,
        latent_dim=LATENTS,
    )
    return {**_t5(scale, family="UMT5"), "vae": vae, "transformer": transformer}


def _oobleck() -> diffusers.AutoencoderOobleck:
    return diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4, 4],
        channel_multiples=[1, 2, 2],
        decoder_channels=8,
        decoder_input_channels=LATENTS,
        sampling_rate=RATE,
    )


def _stable_audio(scale: int = 1) -> Parts:
    width = scale * T5_WIDTH
    transformer = diffusers.StableAudioDiTModel(
        **heads(scale),
        sample_size=2 * RATE // 32,
        in_channels=LATENTS,
        out_channels=LATENTS,
        num_layers=3,
        num_key_value_attention_heads=scale,
        cross_attention_dim=width,
        time_proj_dim=16,
        global_states_input_dim=2 * width,
        cross_attention_input_dim=width,
    )
    projection = StableAudioProjectionModel(text_encoder_dim=width, conditioning_dim=width, min_value=0, max_value=2)
    scheduler = diffusers.EDMDPMSolverMultistepScheduler(
        sigma_min=0.3, sigma_max=50.0, prediction_type="v_prediction", sigma_schedule="exponential"
    )
    parts: Parts = {"vae": _oobleck(), "projection_model": projection, "transformer": transformer}
    return {**_t5(scale), **parts, "scheduler": scheduler}


def _stable_audio_3(scale: int = 1) -> Parts:
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[], model_max_length=TEXT_TOKENS
    )
    config = transformers.T5GemmaConfig(encoder={**_size(tokenizer, scale), "head_dim": 16}, is_encoder_decoder=False)
    width = scale * T5_WIDTH
    transformer = diffusers.StableAudio3DiTModel(
        io_channels=LATENTS,
        embed_dim=width,
        depth=3,
        num_heads=2 * scale,
        cond_token_dim=width,
        global_cond_dim=width,
        local_add_cond_dim=LATENTS + 1,
        timestep_features_dim=16,
        num_memory_tokens=4,
    )
    vae = diffusers.AutoencoderSAME(
        patch_size=16,
        encoder_channels=16,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(2,),
        latent_dim=LATENTS,
        dim_heads=8,
        sampling_rate=RATE,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.T5GemmaEncoderModel(config),
        "duration_embedder": StableAudio3DurationEmbedder(output_dim=width, fourier_dim=16),
        "transformer": transformer,
        "vae": vae,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    }


def _ace_step(scale: int = 1) -> Parts:
    tokenizer = tokenizer_of("Qwen2", first=("<|endoftext|>",))
    size: Parts = {"hidden_size": scale * TRANSFORMER_WIDTH, "intermediate_size": scale * 64}
    size |= {"num_attention_heads": 2 * scale, "num_key_value_heads": scale, "head_dim": 16}
    transformer = diffusers.AceStepTransformer1DModel(
        **size, num_hidden_layers=4, in_channels=3 * LATENTS, audio_acoustic_hidden_dim=LATENTS, sliding_window=8
    )
    condition = AceStepConditionEncoder(
        **size,
        text_hidden_dim=scale * T5_WIDTH,
        timbre_hidden_dim=LATENTS,
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
        sliding_window=8,
    )
    condition.silence_latent.normal_()
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen3Model(transformers.Qwen3Config(**_size(tokenizer, scale), head_dim=16)),
        "vae": _oobleck(),
        "transformer": transformer,
        "condition_encoder": condition,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0, invert_sigmas=False),
    }


def _seconds(name: str) -> Callable[[int], Parts]:
    """A second of sound where a picture would be 64 pixels high."""
    return lambda height: {name: height / PIXELS}


def _noise(height: int) -> Parts:
    """Sound to begin with."""
    audio = torch.rand(1, 2, RATE * height // PIXELS, generator=torch.Generator().manual_seed(2)) - 0.5
    return {"audio": audio, "duration": height / PIXELS}


def _hole(height: int) -> Parts:
    return {**_noise(height), "mask_start_seconds": height / PIXELS / 4, "mask_end_seconds": height / PIXELS / 2}


CASES: tuple[TinyCase, ...] = (
    recipe("StableAudio", _stable_audio, _seconds("audio_end_in_s")),
    recipe("StableAudio3", _stable_audio_3, _seconds("duration"), guidance_scale=2.0),
    recipe("StableAudio3AudioToAudio", _stable_audio_3, _noise, init_noise_level=0.8),
    recipe("StableAudio3Inpaint", _stable_audio_3, _hole),
    recipe("AceStep", _ace_step, _seconds("audio_duration"), lyrics="fox fox", max_text_length=64),
    recipe("LongCatAudioDiT", _longcat, _seconds("audio_duration_s")),
)

OPTIONAL_PARTS: dict[str, str] = {}
