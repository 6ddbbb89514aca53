"""Language models that read prompts, some of which see pictures too, and what spells for them."""

from typing import Any

import transformers

from more_pipelines import _size, _vocab
from tiny_pipelines import T5_WIDTH, Parts

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIGHT = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = """
{%- for message in messages -%}
<|im_start|>{{ message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"""

PATCH = 8
SEEN = 4 * PATCH  # The side of the largest picture that a model sees.
VISION: Parts = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": PATCH}


class PictureProcessor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Qwen's processor without the half for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def _tokenizer(*more: str) -> Any:
    """A tokenizer that spells letter by letter, with the marks of chats and of pictures."""
    marks = [*MARKS, *SIGHT, *more]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=_vocab(*marks, "\u0120", "\u010a", *".,:"), merges=[], extra_special_tokens=marks[1:]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def _processor(tokenizer: Any) -> PictureProcessor:
    """Pictures become few patches, however large they are."""
    size = {"shortest_edge": PATCH * PATCH, "longest_edge": SEEN * SEEN}
    pictures = transformers.Qwen2VLImageProcessor(size=size, patch_size=PATCH)
    return PictureProcessor(pictures, tokenizer, chat_template=CHAT)


def _tokens(tokenizer: Any) -> Parts:
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in names.items()}


def _qwen_3(tokenizer: Any, scale: int = 1, **settings: Any) -> Any:
    size = {**_size(tokenizer, scale), **settings}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, head_dim=16))


def _qwen_2_vl(tokenizer: Any, scale: int = 1) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {**VISION, "out_hidden_size": scale * T5_WIDTH, "window_size": 2 * PATCH, "fullatt_block_indexes": [1]}
    text = {**_size(tokenizer, scale), "rope_parameters": rotary}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_tokens(tokenizer))
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen_3_vl(tokenizer: Any, scale: int = 1, layers: int = 3) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    vision = {**VISION, "out_hidden_size": scale * T5_WIDTH, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0]}
    text = {**_size(tokenizer, scale), "head_dim": 16, "rope_parameters": rotary, "num_hidden_layers": layers}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_tokens(tokenizer))
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen_3_5(tokenizer: Any, scale: int = 1) -> Any:
    """A language model most of whose layers remember by a recurrence instead of by attention."""
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    vision = {**VISION, "out_hidden_size": scale * T5_WIDTH, "num_position_embeddings": 16}
    text = {**_size(tokenizer, scale), "head_dim": 16, "rope_parameters": {**rotary, "partial_rotary_factor": 1.0}}
    text |= {f"linear_{side}_head_dim": 8 for side in ("key", "value")}
    text |= {f"linear_num_{side}_heads": 2 * scale for side in ("key", "value")}
    text |= {"num_hidden_layers": 4}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **_tokens(tokenizer))
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _mistral_3(tokenizer: Any, scale: int = 1) -> Any:
    text = {**_size(tokenizer, scale), "head_dim": 16, "model_type": "mistral"}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": SEEN, "patch_size": PATCH}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=_tokens(tokenizer)["image_token_id"]
    )
    return transformers.Mistral3ForConditionalGeneration(config)
