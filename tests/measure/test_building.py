"""Networks without weights have the dtypes that loading gives them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

from tightfit.catalog.known import known_model
from tightfit.checkpoint.loading import quietly
from tightfit.measure.build_models import build_network, build_part
from tightfit.measure.dummy_tokenizers import StandInProcessor, StandInTokenizer
from tightfit.run.simulate import pipeline_for
from tightfit.schema.request import Request


class Strict(transformers.T5EncoderModel):  # type: ignore[misc]
    """Keeps its norms in float32 under bfloat16 too."""

    _keep_in_fp32_modules_strict = ("layer_norm",)


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
STAGES = {"block_out_channels": (8, 16), "norm_num_groups": 4}
NETWORKS: dict[Any, dict[str, Any]] = {
    transformers.T5EncoderModel: T5,
    transformers.UMT5EncoderModel: T5,
    Strict: T5,
    transformers.CLIPTextModel: LLAMA,
    transformers.LlamaModel: LLAMA,
    diffusers.WanTransformer3DModel: {**HEADS, "text_dim": 32, "freq_dim": 16, "ffn_dim": 64, "num_layers": 2},
    diffusers.CogVideoXTransformer3DModel: {**HEADS, "text_embed_dim": 32, "num_layers": 2, "sample_frames": 9},
    diffusers.SD3Transformer2DModel: {
        **HEADS,
        "num_layers": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pos_embed_max_size": 16,
    },
    diffusers.PixArtTransformer2DModel: {**HEADS, "num_layers": 2, "cross_attention_dim": 32, "caption_channels": 32},
    diffusers.AutoencoderKLFlux2: {
        **STAGES,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
}


def maker(kind: Any, config: dict[str, Any]) -> Callable[[], Any]:
    if issubclass(kind, transformers.PreTrainedModel):
        return lambda: kind(kind.config_class(**config))
    return lambda: kind(**config)


def dtypes(network: nn.Module) -> dict[str, torch.dtype]:
    return {path: tensor.dtype for path, tensor in [*network.named_parameters(), *network.named_buffers()]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
def test_dtypes_are_those_of_a_loaded_network(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    make = maker(kind, NETWORKS[kind])
    with quietly():
        make().save_pretrained(tmp_path)
        loaded = kind.from_pretrained(tmp_path, torch_dtype=dtype)
    built = build_network(make, dtype)
    assert dtypes(built) == dtypes(loaded)


def test_t5_takes_two_bytes_a_parameter_in_bfloat16_and_more_in_float16() -> None:
    part = known_model("flux.1-dev").components["text_encoder_2"]
    assert part.parameters
    assert weight_bytes(build_part("text_encoder_2", part)) == 2 * part.parameters
    half = part.model_copy(update={"dtype": "float16"})
    layers, wide = part.config["num_layers"], part.config["d_model"] * part.config["d_ff"]
    assert weight_bytes(build_part("text_encoder_2", half)) == 2 * part.parameters + 2 * layers * wide


def test_no_notice_of_diffusers_is_passed_on_while_a_known_model_is_built() -> None:
    """Chroma's network uses a class that diffusers deprecates; warnings are errors here."""
    pipe, _ = pipeline_for("chroma1-hd", Request(), None)
    assert type(pipe).__name__ == "ChromaPipeline"


def test_an_image_processor_is_the_library_s_own() -> None:
    model = known_model("wan-2.1-i2v-14b-480p")
    processor = build_part("image_processor", model.components["image_processor"])
    given = processor(images=Image.new("RGB", (832, 480)), return_tensors="pt")
    assert given.pixel_values.shape == (1, 3, 224, 224)


def weight_bytes(network: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


@pytest.mark.parametrize(
    ("padding", "length", "counted"), [("max_length", 8, 7), ("max_length", 1, 1), (True, 8, 8), (False, 100, 77)]
)
def test_a_padded_prompt_leaves_something_to_pad(padding: bool | str, length: int, counted: int) -> None:
    """So that an encoder makes the mask that it makes for most prompts."""
    tokens = StandInTokenizer(model_max_length=length)(["a cat", "a dog"], padding=padding)
    assert tokens.input_ids.shape == tokens.attention_mask.shape == (2, min(length, 77))
    assert tokens.attention_mask.sum(dim=1).tolist() == [counted] * 2


@pytest.mark.parametrize("size", [(64, 64), (5, 8), (200, 40), (300, 600), (57, 43)])
@pytest.mark.parametrize("pictures", [1, 2])
def test_pictures_take_as_many_tokens_as_with_the_published_processor(size: tuple[int, int], pictures: int) -> None:
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 32 * 32, "max_pixels": 128 * 96}
    images = [Image.new("RGB", size) for _ in range(pictures)]
    published = transformers.Qwen2VLImageProcessor(**sizes)(images, return_tensors="pt")
    found = StandInProcessor(**sizes, image_token_id=9)(["a cat"], images=images if pictures > 1 else images[0])
    assert found["pixel_values"].shape == published["pixel_values"].shape
    assert torch.equal(found["image_grid_thw"], published["image_grid_thw"])
    tokens = int(published["image_grid_thw"].prod(dim=1).sum()) // 4
    assert (found["input_ids"] == 9).sum() == tokens
    assert found["input_ids"].shape == found["attention_mask"].shape == (1, 77 + tokens)


def test_a_processor_without_pictures_is_a_tokenizer() -> None:
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 1024, "max_pixels": 2048}
    found = StandInProcessor(**sizes, image_token_id=9, model_max_length=8)("a cat", padding="max_length")
    assert set(found) == {"input_ids", "attention_mask"}
    assert found["input_ids"].shape == (1, 8)


def test_a_prompt_in_a_long_template_has_more_tokens() -> None:
    """Pipelines cut the template's tokens off, and nothing would be left of 77."""
    assert StandInTokenizer()("a cat " * 100, padding=True).input_ids.shape == (1, 150)
    assert StandInTokenizer()("a cat " * 100, padding=True, max_length=100).input_ids.shape == (1, 100)


class Positions(nn.Module):
    """Tables as diffusers' position embeddings make them: of a few numbers, and then large."""

    def __init__(self, side: int, looks: bool = False) -> None:
        super().__init__()
        places = torch.arange(side, dtype=torch.float64)
        table = torch.outer(places, places + 1)
        both = torch.cat([table.sin(), table.cos()], dim=1)
        assert not looks or both[0, 0].item() == 0
        self.register_buffer("table", both.float())
        self.register_buffer("few", places)


def test_a_huge_table_that_a_network_computes_takes_no_memory() -> None:
    large, small = (build_network(lambda side=side: Positions(side), torch.float32) for side in (2100, 64))
    assert large.table.is_meta
    assert (large.table.shape, large.table.dtype) == ((2100, 4200), torch.float32)
    assert not large.few.is_meta
    assert torch.equal(small.table, Positions(64).table)


def test_a_network_that_looks_at_its_huge_table_is_built_with_it() -> None:
    built = build_network(lambda: Positions(2100, looks=True), torch.float32)
    assert torch.equal(built.table, Positions(2100).table)
