"""Kandinsky 1, 2.2 and 3: a prior makes a picture's embedding of the prompt's, and a U-Net makes a picture of that."""

from typing import Any

import diffusers
import transformers
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

from more_pipelines import SPACE, _vocab
from pipeline_classes.unets_parts import (
    STEPS,
    joined,
    mask_of,
    prior_transformer,
    recipe,
    seeded,
    speak_zeros,
    vision,
    without,
)
from tiny_pipelines import (
    CLIP_WIDTH,
    HALFWAY,
    LATENT_PIXELS,
    PIXELS,
    SQUARE,
    T5_WIDTH,
    Parts,
    TinyCase,
    _clip,
    _picture,
    _t5,
    clip_size,
)

EMBEDDING = CLIP_WIDTH  # As wide at every scale, for the pipelines that are given one.


def _movq(stages: int = 3) -> diffusers.VQModel:
    """The autoencoder, whose decoder is told of the latents in every norm, of 32 groups each."""
    inner = ("DownEncoderBlock2D",) * (stages - 1)
    return diffusers.VQModel(
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=64,
        norm_type="spatial",
        down_block_types=(*inner, "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", *["UpDecoderBlock2D"] * (stages - 1)),
        block_out_channels=(32,) * stages,
        norm_num_groups=8,
    )


def _unet(scale: int, **settings: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        **{"in_channels": 4, "out_channels": 8, "cross_attention_dim": scale * CLIP_WIDTH, **settings},
        sample_size=LATENT_PIXELS,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(scale * 16, scale * 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        resnet_time_scale_shift="scale_shift",
    )


def _scheduler() -> diffusers.DDPMScheduler:
    return diffusers.DDPMScheduler(
        beta_schedule="linear", beta_start=0.00085, beta_end=0.012, variance_type="learned_range", clip_sample=False
    )


def _second(scale: int = 1, embedding: int = EMBEDDING, kind: str = "image", stages: int = 3, **settings: Any) -> Parts:
    unet = _unet(
        scale, encoder_hid_dim=embedding, encoder_hid_dim_type="image_proj", addition_embed_type=kind, **settings
    )
    return {"unet": unet, "scheduler": _scheduler(), "movq": _movq(stages)}


def _second_masked(scale: int = 1) -> Parts:
    return _second(scale, in_channels=9)


def _second_hinted(scale: int = 1) -> Parts:
    """Three halvings of the hint are built in; its four channels come beside the latents'."""
    return _second(scale, kind="image_hint", stages=4, in_channels=8)


def _prior(scale: int = 1) -> Parts:
    return {
        "prior": prior_transformer(scale),
        **_clip(scale, projected=True),
        **vision(scale, processor="image_processor"),
        "scheduler": diffusers.UnCLIPScheduler(
            prediction_type="sample", variance_type="fixed_small_log", clip_sample_range=5.0
        ),
    }


def _with_prior(scale: int, decoder: Parts) -> Parts:
    prior = _prior(scale)
    renamed = {f"prior_{name}": part for name, part in without(prior, "prior").items()}
    return {**decoder, **renamed, "prior_prior": prior["prior"]}


def _second_combined(scale: int = 1) -> Parts:
    return _with_prior(scale, _second(scale, scale * CLIP_WIDTH))


def _second_combined_masked(scale: int = 1) -> Parts:
    return _with_prior(scale, _second(scale, scale * CLIP_WIDTH, in_channels=9))


def _multilingual(scale: int, embedding: int) -> Parts:
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = special + [(token, -2.0) for token in _vocab(SPACE)] + [("<mask>", 0.0)]
    size = without(clip_size(scale), "projection_dim")
    config = MCLIPConfig(
        transformerDimSize=scale * CLIP_WIDTH,
        imageDimSize=embedding,
        **size,
        vocab_size=len(vocab),
        max_position_embeddings=80,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    tokenizer = transformers.XLMRobertaTokenizer(vocab=vocab, model_max_length=77)
    return {"tokenizer": tokenizer, "text_encoder": MultilingualCLIP(config)}


def _first(scale: int = 1, embedding: int = EMBEDDING, **settings: Any) -> Parts:
    unet = _unet(
        scale,
        cross_attention_dim=embedding,
        encoder_hid_dim=scale * CLIP_WIDTH,
        encoder_hid_dim_type="text_image_proj",
        addition_embed_type="text_image",
        **settings,
    )
    scheduler = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False, steps_offset=1)
    return {**_multilingual(scale, embedding), "unet": unet, "scheduler": scheduler, "movq": _movq()}


def _first_masked(scale: int = 1) -> Parts:
    return _first(scale, in_channels=9)


def _first_combined(scale: int = 1) -> Parts:
    return _with_prior(scale, _first(scale, scale * CLIP_WIDTH))


def _first_combined_masked(scale: int = 1) -> Parts:
    return _with_prior(scale, _first(scale, scale * CLIP_WIDTH, in_channels=9))


def _third(scale: int = 1) -> Parts:
    unet = diffusers.Kandinsky3UNet(
        time_embedding_dim=scale * 32,
        groups=4,
        attention_head_dim=8,
        layers_per_block=2,
        block_out_channels=(scale * 16, scale * 32, scale * 32, scale * 32),
        cross_attention_dim=scale * T5_WIDTH,
        encoder_hid_dim=scale * T5_WIDTH,
    )
    speak_zeros(unet)
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=False)
    return {**_t5(scale), "unet": unet, "scheduler": scheduler, "movq": _movq()}


def _embeddings(height: int) -> Parts:
    return {"image_embeds": seeded(1, EMBEDDING), "negative_image_embeds": seeded(1, EMBEDDING, seed=4)}


def _hint(height: int) -> Parts:
    """As large as the picture, whose sides become multiples of 64."""
    return {"hint": seeded(1, 3, -(-height // 64) * 64, PIXELS, seed=5, low=0.0)}


def _square_hint(height: int) -> Parts:
    return {"hint": seeded(1, 3, height, height, seed=5, low=0.0)}


def _square(height: int) -> Parts:
    """Square, because width and height change places where these prepare their picture."""
    return {**_picture(height), "width": height}


def _mask(height: int) -> Parts:
    return {**_picture(height), "mask_image": mask_of(height)}


def _more_pictures(height: int) -> Parts:
    return {"num_images_per_prompt": max(1, height // 32)}


EMBEDDED = joined(_square, _embeddings)
EMBEDDED_MASK = joined(_mask, _embeddings)
TWO_STEPS: Parts = {"prior_num_inference_steps": 2}

CASES: tuple[TinyCase, ...] = (
    recipe("KandinskyV22Prior", _prior, _more_pictures),
    recipe("KandinskyV22PriorEmb2Emb", _prior, joined(_picture, _more_pictures), **HALFWAY),
    recipe("KandinskyV22", _second, _embeddings, common=STEPS, **SQUARE),
    recipe("KandinskyV22Img2Img", _second, EMBEDDED, common=STEPS, **SQUARE, **HALFWAY),
    recipe("KandinskyV22Inpaint", _second_masked, EMBEDDED_MASK, common=STEPS, **SQUARE),
    recipe("KandinskyV22Controlnet", _second_hinted, joined(_embeddings, _hint), common=STEPS, **SQUARE),
    recipe(
        "KandinskyV22ControlnetImg2Img",
        _second_hinted,
        joined(EMBEDDED, _square_hint),
        common=STEPS,
        **SQUARE,
        **HALFWAY,
    ),
    recipe("KandinskyV22Combined", _second_combined, **SQUARE, **TWO_STEPS),
    recipe("KandinskyV22Img2ImgCombined", _second_combined, _square, **SQUARE, **HALFWAY, **TWO_STEPS),
    recipe("KandinskyV22InpaintCombined", _second_combined_masked, _mask, **SQUARE, **TWO_STEPS),
    recipe("KandinskyPrior", _prior, _more_pictures),
    recipe("Kandinsky", _first, _embeddings, **SQUARE),
    recipe("KandinskyImg2Img", _first, EMBEDDED, **SQUARE, **HALFWAY),
    recipe("KandinskyInpaint", _first_masked, EMBEDDED_MASK, **SQUARE),
    recipe("KandinskyCombined", _first_combined, **SQUARE, **TWO_STEPS),
    recipe("KandinskyImg2ImgCombined", _first_combined, _square, **SQUARE, **HALFWAY, **TWO_STEPS),
    recipe("KandinskyInpaintCombined", _first_combined_masked, _mask, **SQUARE, **TWO_STEPS),
    recipe("Kandinsky3", _third, **SQUARE),
    recipe("Kandinsky3Img2Img", _third, _picture, **HALFWAY),
)

OPTIONAL_PARTS: dict[str, str] = {}
