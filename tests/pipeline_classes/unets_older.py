"""Pipelines around Stable Diffusion that diffusers keeps, but no longer looks after."""

from typing import Any

import diffusers
import transformers
from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
    RobertaSeriesConfig,
    RobertaSeriesModelWithTransformation,
)

from more_pipelines import SPACE, _size, _vocab
from pipeline_classes.unets_parts import STEPS, VIEW, recipe, seeded, vision, without
from tiny_pipelines import (
    CLIP_WIDTH,
    HALFWAY,
    SQUARE,
    Parts,
    TinyCase,
    _masked_picture,
    _picture,
    _stable_diffusion,
    clip_size,
)

SPECIAL = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]


def letters_of_roberta() -> transformers.XLMRobertaTokenizer:
    vocab = SPECIAL + [(token, -2.0) for token in _vocab(SPACE)] + [("<mask>", 0.0)]
    return transformers.XLMRobertaTokenizer(vocab=vocab, model_max_length=77)


def _alt(scale: int = 1) -> Parts:
    tokenizer = letters_of_roberta()
    config = RobertaSeriesConfig(
        **without(clip_size(scale), "projection_dim"),
        project_dim=scale * CLIP_WIDTH,
        vocab_size=len(tokenizer),
        max_position_embeddings=80,
    )
    text = {"tokenizer": tokenizer, "text_encoder": RobertaSeriesModelWithTransformation(config)}
    return {**_stable_diffusion(scale), **text}


def _parallel(scale: int = 1) -> Parts:
    scheduler = diffusers.DDIMParallelScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    return {**_stable_diffusion(scale), "scheduler": scheduler}


def _captions(scale: int) -> Parts:
    """What would say what is in a picture, to invert it."""
    vocab = _vocab("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer = transformers.BertTokenizer(vocab=vocab)
    text = without(_size_of_bert(tokenizer, scale), "num_key_value_heads")
    seen = without(clip_size(scale), "projection_dim") | {"image_size": VIEW, "patch_size": 8}
    config = transformers.BlipConfig(text_config=text, vision_config=seen, projection_dim=scale * CLIP_WIDTH)
    images = transformers.BlipImageProcessorPil(size={"height": VIEW, "width": VIEW})
    return {
        "caption_generator": transformers.BlipForConditionalGeneration(config),
        "caption_processor": transformers.BlipProcessor(images, tokenizer),
    }


def _size_of_bert(tokenizer: Any, scale: int) -> Parts:
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    size = without(_size(tokenizer, scale), *tokens)
    return {**size, **tokens, "encoder_hidden_size": scale * CLIP_WIDTH}


def _zero(scale: int = 1) -> Parts:
    inverse = diffusers.DDIMInverseScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    return {**_stable_diffusion(scale), **_captions(scale), "inverse_scheduler": inverse}


def _directions(height: int) -> Parts:
    """From the mean of these to the mean of those is where the prompt's embedding is moved: each channel alike."""
    return {"source_embeds": seeded(2, 77, 1), "target_embeds": seeded(2, 77, 1, seed=4)}


def _cycled(scale: int = 1) -> Parts:
    """The last step has noise too, as in the real ones: without, the pipeline divides by none."""
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", clip_sample=False, steps_offset=1, set_alpha_to_one=False
    )
    return {**_stable_diffusion(scale), "scheduler": scheduler}


def _cycle(height: int) -> Parts:
    return {**_picture(height), "source_prompt": "a grey owl"}


def _safe(scale: int = 1) -> Parts:
    return {**_stable_diffusion(scale), **vision(scale)}


CYCLE: Parts = {**STEPS, "prompt": "a red fox"}
SAFE: Parts = {"sld_guidance_scale": 1000.0, "sld_warmup_steps": 0, "sld_threshold": 0.05, "sld_momentum_scale": 0.3}

CASES: tuple[TinyCase, ...] = (
    recipe("CycleDiffusion", _cycled, _cycle, common=CYCLE, **HALFWAY, source_guidance_scale=2.0),
    recipe(
        "StableDiffusionInpaintPipelineLegacy",
        _stable_diffusion,
        _masked_picture,
        pipeline="StableDiffusionInpaintPipelineLegacy",
        **HALFWAY,
    ),
    recipe("StableDiffusionModelEditing", _stable_diffusion, **SQUARE),
    recipe("StableDiffusionParadigms", _parallel, **SQUARE, parallel=2),
    recipe("StableDiffusionPix2PixZero", _zero, _directions, **SQUARE),
    recipe(
        "StableDiffusionPipelineSafe", _safe, pipeline="StableDiffusionPipelineSafe", **SQUARE, output_type="np", **SAFE
    ),
    recipe("AltDiffusion", _alt, **SQUARE),
    recipe("AltDiffusionImg2Img", _alt, _picture, **HALFWAY),
)

OPTIONAL_PARTS: dict[str, str] = dict.fromkeys(
    (
        "OnnxStableDiffusionImg2ImgPipeline",
        "OnnxStableDiffusionInpaintPipeline",
        "OnnxStableDiffusionInpaintPipelineLegacy",
        "OnnxStableDiffusionPipeline",
        "OnnxStableDiffusionUpscalePipeline",
        "StableDiffusionOnnxPipeline",
    ),
    "needs ONNX Runtime, which is not installed",
)
