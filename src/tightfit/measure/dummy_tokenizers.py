"""Dummy tokenizers and processors of known models: numbers of tokens and sizes of tensors matter, values do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers

__all__ = ["StandInProcessor", "StandInTokenizer"]

PROMPT_TOKENS = 77  # number of tokens of a prompt that is not padded to a fixed length
CHARACTERS = 4  # of a token, about: a prompt within a long template has more tokens


class StandInTokenizer:
    """Has a tokenizer's interface, with meaningless tokens: the last is padding where it pads to `max_length`.

    Some encoders drop a mask that masks nothing, and a mask that masks something takes memory.
    """

    bos_token_id, eos_token_id, pad_token_id = 0, 2, 1
    bos_token, eos_token, pad_token = "<s>", "</s>", "<pad>"
    padding_side = "right"
    added_tokens_encoder: Mapping[str, int] = MappingProxyType({})

    def __init__(self, model_max_length: int = 512, **_: Any) -> None:
        self.model_max_length = model_max_length

    @property
    def tokenizer(self) -> StandInTokenizer:
        return self

    def __call__(
        self, text: Any = None, *, padding: Any = False, max_length: int | None = None, **_: Any
    ) -> transformers.BatchEncoding:
        """Return `input_ids` and `attention_mask`, int64 of shape (texts, tokens)."""
        texts = [text] if text is None or isinstance(text, str) else text
        longest = max_length or self.model_max_length
        padded = padding == "max_length"
        most = max((len(each) // CHARACTERS for each in texts if isinstance(each, str)), default=0)
        tokens = longest if padded else min(max(PROMPT_TOKENS, most), longest)
        ids = torch.full((len(texts), tokens), 5, dtype=torch.int64)
        mask = torch.ones_like(ids)
        ids[:, -1] = self.eos_token_id
        if padded and tokens > 1:
            ids[:, -2:] = torch.tensor([self.eos_token_id, self.pad_token_id])
            mask[:, -1] = 0
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **options: Any) -> Any:
        if not tokenize:
            return ["" for _ in messages]
        return self([""] * len(messages), **options)

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.bos_token_id, *(5 for _ in self.tokenize(text)), self.eos_token_id]

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return ["" for _ in ids]


class StandInProcessor(StandInTokenizer):
    """Has the interface of Qwen2-VL's processor, whose tokens include those of pictures.

    A picture is resized to multiples of `merge_size` patches a side, between `min_pixels` and `max_pixels`; each
    `merge_size` x `merge_size` patches are one token.
    """

    def __init__(
        self,
        *,
        patch_size: int,
        merge_size: int,
        temporal_patch_size: int,
        min_pixels: int,
        max_pixels: int,
        image_token_id: int,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._patch, self._merge = patch_size, merge_size
        self._numbers = 3 * temporal_patch_size * patch_size**2  # of a patch: a still picture is repeated
        self._fewest, self._most = min_pixels, max_pixels
        self._token = image_token_id

    def __call__(self, text: Any = None, images: Any = None, **options: Any) -> transformers.BatchEncoding:
        """Return the text's tokens; with images also `pixel_values`, (patches, numbers), and `image_grid_thw`."""
        found = super().__call__(text, **options)
        if images is None:
            return found
        grids = torch.tensor([self._grid(*each.size) for each in (images if isinstance(images, list) else [images])])
        patches = int(grids.prod(dim=1).sum())
        ids = found["input_ids"]
        seen = torch.full((len(ids), patches // self._merge**2 // len(ids)), self._token)
        joined = {"input_ids": (ids, seen), "attention_mask": (found["attention_mask"], torch.ones_like(seen))}
        tokens = {name: torch.cat([old[:, :-1], new, old[:, -1:]], dim=1) for name, (old, new) in joined.items()}
        pixels = torch.zeros(patches, self._numbers)
        return transformers.BatchEncoding(tokens | {"pixel_values": pixels, "image_grid_thw": grids})

    def _grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches of a picture: in time, down and across (transformers' `smart_resize`)."""
        step = self._patch * self._merge
        sides = [round(side / step) * step for side in (height, width)]
        if math.prod(sides) > self._most:
            shrunk = math.sqrt(height * width / self._most)
            sides = [max(step, math.floor(side / shrunk / step) * step) for side in (height, width)]
        elif math.prod(sides) < self._fewest:
            grown = math.sqrt(self._fewest / (height * width))
            sides = [math.ceil(side * grown / step) * step for side in (height, width)]
        return 1, sides[0] // self._patch, sides[1] // self._patch
