"""Latent diffusion of sound: CLAP reads the prompt, a U-Net draws a spectrogram, and a vocoder sings it."""

from typing import Any

import diffusers
import transformers

from more_pipelines import _vocab
from pipeline_classes.unets_parts import recipe, seeded, unet_of_blocks, without
from tiny_pipelines import CLIP_WIDTH, LATENT_PIXELS, T5_WIDTH, Parts, TinyCase, _image_vae, _t5, clip_size

MEL = 32  # Bands of a spectrogram.
SPACE = "\u0120"


def _tokenizer() -> transformers.RobertaTokenizer:
    return transformers.RobertaTokenizer(
        vocab=_vocab("<s>", "<pad>", "</s>", "<unk>", "<mask>", SPACE), merges=[], model_max_length=77
    )


def _text_config(scale: int) -> transformers.ClapTextConfig:
    size = {**clip_size(scale), "vocab_size": len(_tokenizer()), "max_position_embeddings": 80}
    return transformers.ClapTextConfig(**size, pad_token_id=1, bos_token_id=0, eos_token_id=2)


def _clap(scale: int) -> transformers.ClapModel:
    audio = transformers.ClapAudioConfig(
        spec_size=64,
        num_mel_bins=MEL,
        patch_embeds_hidden_size=16,
        hidden_size=32,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        num_hidden_layers=2,
        projection_dim=scale * CLIP_WIDTH,
    )
    config = transformers.ClapConfig(
        text_config=_text_config(scale), audio_config=audio, projection_dim=scale * CLIP_WIDTH
    )
    return transformers.ClapModel(config)


def _vocoder() -> transformers.SpeechT5HifiGan:
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=MEL,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
        normalize_before=False,
        initializer_range=0.2,
    )
    return transformers.SpeechT5HifiGan(config)


def _singing(scale: int, unet: Any) -> Parts:
    return {
        "tokenizer": _tokenizer(),
        "vae": _image_vae(in_channels=1, out_channels=1, latent_channels=4),
        "unet": unet,
        "scheduler": diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
        "vocoder": _vocoder(),
    }


def _by_class(scale: int, embedding: int) -> diffusers.UNet2DConditionModel:
    """The prompt's embedding comes beside the time's; attention is of the spectrogram to itself."""
    return unet_of_blocks(
        scale,
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        cross_attention_dim=(scale * 16, scale * 32),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=embedding,
        class_embeddings_concat=True,
    )


def _audioldm(scale: int = 1) -> Parts:
    text = transformers.ClapTextModelWithProjection(_text_config(scale))
    return {**_singing(scale, _by_class(scale, scale * CLIP_WIDTH)), "text_encoder": text}


def _listener() -> transformers.ClapFeatureExtractor:
    return transformers.ClapFeatureExtractor(feature_size=MEL)


def _musicldm(scale: int = 1) -> Parts:
    """Whose pipeline knows an older CLAP: it is given embeddings, as wide at every scale."""
    unet = _by_class(scale, CLIP_WIDTH)
    return {**_singing(scale, unet), "text_encoder": _clap(scale), "feature_extractor": _listener()}


def _audioldm2(scale: int = 1) -> Parts:
    """Two text encoders, and a language model that goes on from both with tokens without words."""
    width, t5 = scale * CLIP_WIDTH, scale * T5_WIDTH
    speaker = transformers.GPT2Config(vocab_size=8, n_positions=160, n_embd=width, n_layer=3, n_head=2)
    speaker.max_new_tokens = 4
    unet = diffusers.AudioLDM2UNet2DConditionModel(
        sample_size=LATENT_PIXELS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=2 * scale,
        cross_attention_dim=[[None, width, t5]] * 2,
    )
    projection = diffusers.AudioLDM2ProjectionModel(
        text_encoder_dim=width, text_encoder_1_dim=t5, langauge_model_dim=width
    )
    return {
        **_singing(scale, unet),
        "text_encoder": _clap(scale),
        **_t5(scale, "_2"),
        "projection_model": projection,
        "language_model": transformers.GPT2LMHeadModel(speaker),
        "feature_extractor": _listener(),
    }


def _length(height: int) -> Parts:
    """A thousandth of a second is one column of the spectrogram."""
    return {"audio_length_in_s": height / 1000}


def _embedded_length(height: int) -> Parts:
    embeddings = {"prompt_embeds": seeded(1, CLIP_WIDTH), "negative_prompt_embeds": seeded(1, CLIP_WIDTH, seed=4)}
    return {**embeddings, **_length(height)}


SUNG: Parts = {"prompt": "a red fox", "negative_prompt": "noise", "num_inference_steps": 2, "output_type": "np"}

CASES: tuple[TinyCase, ...] = (
    recipe("AudioLDM", _audioldm, _length, common=SUNG),
    recipe("AudioLDM2", _audioldm2, _length, common=SUNG),
    recipe("MusicLDM", _musicldm, _embedded_length, common=without(SUNG, "prompt", "negative_prompt")),
)

OPTIONAL_PARTS: dict[str, str] = {
    "AudioDiffusionPipeline": "needs librosa, which is not installed",
    "SpectrogramDiffusionPipeline": "needs note_seq, which is not installed",
}
