"""read_places and place_weights: the bytes that from_pretrained would load, or one clear line against them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import AutoencoderKL, WanTransformer3DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from tightfit.checkpoint.folder import ModelFolder, check_folder
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.checkpoint.loading import load_pipeline
from tightfit.checkpoint.tensors import NotLazyLoadable, TensorLocation, locate_weights, read_locations
from tightfit.errors import ModelError
from tightfit.measure.build_models import build_network
from tiny_pipelines import CASES, TinyCase

# no two are alike: that would be a damage that nobody can see
TENSORS = {
    "conv.weight": torch.arange(32.0).reshape(4, 8),
    "conv.bias": torch.arange(4, dtype=torch.float16),
    "scale": torch.tensor(2.0),
    "steps": torch.arange(3),
    "mask": torch.tensor([True, False]),
}
SPLIT = (("conv.weight", "mask"), ("conv.bias", "scale", "steps"))  # the tensors of each shard
SHARDS = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"


class Network(nn.Module):
    """One weight of each kind, without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(8, 4, device="meta")
        self.scale = nn.Parameter(torch.empty((), device="meta"))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(5), persistent=False)


@pytest.fixture
def unet(tmp_path: Path) -> Path:
    """A component's folder with two shards and their index."""
    folder = tmp_path / "unet"
    folder.mkdir()
    for shard, names in zip(SHARDS, SPLIT, strict=True):
        save_file({name: TENSORS[name] for name in names}, folder / shard, metadata={"format": "pt"})
    write_index(folder, {name: shard for shard, names in zip(SHARDS, SPLIT, strict=True) for name in names})
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Saves the second shard with other tensors, "__" for "." in names; None leaves one out. The index follows."""
    held = {name: TENSORS[name] for name in SPLIT[1]} | {
        name.replace("__", "."): value for name, value in tensors.items()
    }
    kept = {name: value for name, value in held.items() if value is not None}
    save_file(kept, folder / SHARDS[1])
    write_index(folder, dict.fromkeys(SPLIT[0], SHARDS[0]) | dict.fromkeys(kept, SHARDS[1]))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its tensors."""
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def with_header(content: object, tensors: bytes) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def find(folder: Path, network: nn.Module | None = None) -> dict[str, TensorLocation]:
    """The places of all weights of `network`, by the shards in `folder` and their index."""
    index = folder / INDEX
    places = read_locations(sorted(folder.glob("*.safetensors")), index if index.exists() else None)
    return locate_weights(network or Network(), places, "unet")


def complaint(folder: Path, network: nn.Module | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        find(folder, network)
    message = str(caught.value)
    assert "\n" not in message
    json.dumps(caught.value.facts)
    return message


def read(place: TensorLocation) -> torch.Tensor:
    with place.path.open("rb") as stream:
        stream.seek(place.offset)
        return torch.frombuffer(bytearray(stream.read(place.size)), dtype=place.dtype).reshape(place.shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# what is found


def test_the_place_of_every_weight(unet: Path) -> None:
    places = find(unet)
    assert list(places) == list(Network().state_dict())
    assert {name: place.path.name for name, place in places.items()} == {
        name: shard for shard, names in zip(SHARDS, SPLIT, strict=True) for name in names
    }
    for name, value in TENSORS.items():
        assert (places[name].dtype, places[name].shape) == (value.dtype, tuple(value.shape))
        assert bits(read(places[name])) == bits(value)


def check_against_loading(folder: ModelFolder, dtype: torch.dtype) -> None:
    built, loaded = build_folder(folder, dtype), load_pipeline(folder, dtype)
    parts = [part for part in folder.components if part.weight_files]
    assert any(part.weight_index for part in parts)
    for part in parts:
        places = locate_weights(
            getattr(built, part.name), read_locations(part.weight_files, part.weight_index), part.name
        )
        expected = getattr(loaded, part.name).state_dict()
        wanted = getattr(built, part.name).state_dict()
        assert list(places) == list(expected)
        for name, place in places.items():
            assert bits(read(place).to(wanted[name].dtype)) == bits(expected[name]), f"{part.name}.{name}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bytes_are_those_that_from_pretrained_loads(case: TinyCase, tmp_path: Path) -> None:
    case.make().save_pretrained(tmp_path / "m", safe_serialization=True, max_shard_size="30KB")
    check_against_loading(check_folder(tmp_path / "m"), torch.float32)


def test_weights_are_stored_in_another_dtype_than_wanted(tmp_path: Path) -> None:
    pipe: Any = next(case for case in CASES if case.name == "StableDiffusion3").make()
    pipe.to(torch.float16).save_pretrained(tmp_path / "m", safe_serialization=True, max_shard_size="30KB")
    check_against_loading(check_folder(tmp_path / "m"), torch.bfloat16)


# names that the libraries change


def save_as(folder: Path, network: nn.Module, rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Saves one file under other names, each shared tensor once; returns the state dict."""
    tensors = network.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in tensors.items()}
    folder.mkdir()
    save_file({rename(name): tensors[name].detach() for name in once.values()}, folder / "model.safetensors")
    return network.state_dict()


SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


def small_clip() -> transformers.CLIPTextModel:
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**SMALL, vocab_size=4, eos_token_id=3))


@pytest.fixture(scope="module")
def clip() -> transformers.CLIPTextModel:
    """Not to be changed."""
    return small_clip()


def small_t5() -> transformers.T5EncoderModel:
    return transformers.T5EncoderModel(transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def small_vae() -> AutoencoderKL:
    """Its attention is of the kind that had other names in old files."""
    return AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1)


def old_attention(name: str) -> str:
    head, attention, tail = name.partition(".attentions.0.")
    for new, old in (("to_q.", "query."), ("to_k.", "key."), ("to_v.", "value."), ("to_out.0.", "proj_attn.")):
        tail = old + tail.removeprefix(new) if attention and tail.startswith(new) else tail
    return head + attention + tail


@pytest.mark.parametrize(
    ("make", "rename"),
    [
        (small_clip, lambda name: f"text_model.{name}"),
        (small_clip, lambda name: name),
        (small_t5, lambda name: name.replace("shared", "encoder.embed_tokens")),
        (small_t5, lambda name: name.replace("encoder.embed_tokens", "shared")),
        (small_vae, old_attention),
    ],
    ids=["clip-prefix", "clip", "t5-embed-tokens", "t5-shared", "vae-attention"],
)
def test_names_of_old_files(tmp_path: Path, make: Callable[[], nn.Module], rename: Callable[[str], str]) -> None:
    torch.manual_seed(0)
    expected = save_as(tmp_path / "unet", make(), rename)
    places = find(tmp_path / "unet", build_network(make, torch.float32))
    assert {name: bits(read(place)) for name, place in places.items()} == {
        name: bits(value) for name, value in expected.items()
    }


def test_tensors_that_the_class_ignores(tmp_path: Path) -> None:
    """Positions that CLIP once saved, a decoder beside T5's encoder, norms that Wan does not use."""
    size: dict[str, Any] = {"num_attention_heads": 1, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 8}
    wan = WanTransformer3DModel(**size, text_dim=4, freq_dim=4)
    superfluous = ((small_clip(), "text_model.embeddings.position_ids"), (small_t5(), "decoder.x"))
    for number, (network, name) in enumerate((*superfluous, (wan, "blocks.0.attn2.norm_added_q.weight"))):
        folder = tmp_path / str(number)
        expected = save_as(folder, network, lambda name: name)
        save_file({name: torch.zeros(1)}, folder / "more.safetensors")
        assert list(find(folder, network)) == list(expected)


def test_weights_that_are_merged_while_loading(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, vocab_size=4)
    mixtral = transformers.MixtralModel(config)
    mixtral.save_pretrained(tmp_path / "unet")  # as the experts were always saved, each by itself
    with pytest.raises(NotLazyLoadable, match=r"'layers.0.mlp.experts.*', which transformers computes from") as caught:
        find(tmp_path / "unet", mixtral)
    assert caught.value.facts["tensor"].startswith("layers.0.")


def test_one_tensor_that_is_stored_twice(tmp_path: Path) -> None:
    """Whether transformers shares it or not depends on the numbers."""
    t5 = small_t5()
    save_as(tmp_path / "unet", t5, lambda name: name.replace("encoder.embed_tokens", "shared"))
    save_file({"encoder.embed_tokens.weight": t5.shared.weight.detach()}, tmp_path / "unet/more.safetensors")
    with pytest.raises(NotLazyLoadable, match=r"one tensor as shared.weight, encoder.embed_tokens.weight, which"):
        find(tmp_path / "unet", t5)


def test_one_weight_under_its_old_and_its_new_name(tmp_path: Path) -> None:
    clip = small_clip()
    save_as(tmp_path / "unet", clip, lambda name: name)
    save_file({"text_model.final_layer_norm.bias": torch.zeros(8)}, tmp_path / "unet/more.safetensors")
    said = "'final_layer_norm.bias' and 'text_model.final_layer_norm.bias', which are one weight of unet"
    assert complaint(tmp_path / "unet", clip) == f"unet/more.safetensors has {said}"


def test_weights_that_the_class_makes_up(unet: Path) -> None:
    clip = small_clip()
    save_as(unet / "clip", clip, lambda name: name.replace("final_layer_norm.bias", "x"))
    assert "unet lacks 1 of 20 weights: final_layer_norm.bias; its files are clip/model.safetensors" in complaint(
        unet / "clip", clip
    )
    clip._keys_to_ignore_on_load_missing = {"final_layer"}
    clip._keys_to_ignore_on_load_unexpected = {"x"}
    with pytest.raises(NotLazyLoadable, match=r"unet lacks final_layer_norm.bias, which CLIPTextModel makes up"):
        find(unet / "clip", clip)


def test_quantized_weights(unet: Path) -> None:
    clip = small_clip()
    clip.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(NotLazyLoadable, match="the weights of unet are stored quantized"):
        find(unet, clip)
    vae = AutoencoderKL.from_config({**small_vae().config, "quantization_config": {"quant_method": "torchao"}})
    with pytest.raises(NotLazyLoadable, match="the weights of unet are stored quantized"):
        find(unet, vae)


# ten ways to damage a checkpoint; the tenth, a file that changes while it is read, is for who reads it


@pytest.mark.parametrize("left", [0, 7, 8, 100, -1])
@pytest.mark.parametrize("shard", SHARDS)
def test_truncated(unet: Path, shard: str, left: int) -> None:
    (unet / shard).write_bytes((unet / shard).read_bytes()[:left])
    assert f"unet/{shard} is truncated: its header promises" in complaint(unet)


# the second shard has steps in bytes 0 to 24, scale from there to 28, conv.bias to 36
LIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "shape": ("conv.bias", {"shape": [5]}, "'conv.bias' with shape [5] of 'F16' in 8 bytes"),
    "negative shape": ("conv.bias", {"shape": [-2, -2]}, "'conv.bias' with shape [-2, -2] of 'F16'"),
    "shape of others": ("conv.bias", {"shape": [True, 4]}, "'conv.bias' with shape [True, 4]"),
    "no shape": ("conv.bias", {"shape": None}, "'conv.bias' with shape None of 'F16'"),
    "dtype": ("scale", {"dtype": "F64"}, "'scale' with shape [] of 'F64' in 4 bytes"),
    "unknown dtype": ("scale", {"dtype": "F4"}, "'scale' as 'F4': tensors are read as F64, F32"),
    "no dtype": ("scale", {"dtype": ["F32"]}, "'scale' with shape [] of ['F32']"),
    "too short": ("scale", {"data_offsets": [24, 26]}, "'scale' with shape [] of 'F32' in 2 bytes"),
    "backwards": ("scale", {"data_offsets": [28, 24]}, "without sound data_offsets"),
    "overlap": ("scale", {"data_offsets": [20, 24]}, "'scale' begin within 'steps'"),
    "gap": ("scale", {"data_offsets": [32, 36]}, "'conv.bias' begin 4 bytes after 'steps'"),
    "beyond the end": ("conv.bias", {"data_offsets": [2**62, 2**62 + 8]}, "is truncated: its header promises"),
}


@pytest.mark.parametrize(("tensor", "lie", "said"), LIES.values(), ids=LIES)
def test_a_header_that_lies(unet: Path, tensor: str, lie: dict[str, Any], said: str) -> None:
    header, tensors = header_of(unet / SHARDS[1])
    header[tensor] |= lie
    (unet / SHARDS[1]).write_bytes(with_header(header, tensors))
    message = complaint(unet)
    assert message.startswith(f"unet/{SHARDS[1]} ")
    assert said in message


@pytest.mark.parametrize("more", [-1, 1, 2**40])
def test_a_header_of_another_length(unet: Path, more: int) -> None:
    data = (unet / SHARDS[0]).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    (unet / SHARDS[0]).write_bytes(struct.pack("<Q", length + more) + data[8:])
    assert complaint(unet).startswith(f"unet/{SHARDS[0]} is ")


def test_wrong_dtypes(unet: Path) -> None:
    change(unet, conv__bias=torch.zeros(4, dtype=torch.int16))
    assert complaint(unet) == f"unet/{SHARDS[1]} has 'conv.bias' in torch.int16, and unet needs torch.float32"
    for wrong in (torch.float32, torch.int32, torch.bool):
        change(unet, steps=torch.zeros(3, dtype=wrong))
        assert f"{SHARDS[1]} has 'steps' in {wrong}, and unet needs torch.int64" in complaint(unet)


def test_missing_tensors(unet: Path) -> None:
    change(unet, conv__bias=None, scale=None)
    files = f"unet/{SHARDS[0]}, unet/{SHARDS[1]}"
    assert complaint(unet) == f"unet lacks 2 of 5 weights: conv.bias, scale; its files are {files}"
    with pytest.raises(ModelError, match=r"unet lacks 5 of 5 weights: conv.bias, conv.weight, mask and 2 more; its"):
        locate_weights(Network(), {}, "unet")


def test_superfluous_tensors(unet: Path) -> None:
    change(unet, conv__bia=torch.zeros(4), table=torch.zeros(5))
    assert complaint(unet) == f"unet/{SHARDS[1]} has 'conv.bia', which is no weight of unet (2 such tensors)"


def test_wrong_shapes(unet: Path) -> None:
    change(unet, conv__bias=torch.zeros(2, 2))
    assert complaint(unet) == f"unet/{SHARDS[1]} has 'conv.bias' as [2, 2], and unet needs [4]"


def test_two_shards_swapped(unet: Path) -> None:
    first, second = (unet / shard for shard in SHARDS)
    first.rename(unet / "aside")
    second.rename(first)
    (unet / "aside").rename(second)
    assert complaint(unet).startswith(f"unet/{SHARDS[0]} has 'steps', which {INDEX} has in {SHARDS[1]}")


def test_files_that_cannot_be_read(unet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, data = unet / SHARDS[1], (unet / SHARDS[1]).read_bytes()
    usual = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path == shard:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *args, **options)

    with monkeypatch.context() as patch:  # as root nothing is forbidden
        patch.setattr(Path, "open", refuse)
        assert complaint(unet) == f"unet/{SHARDS[1]} cannot be read: Permission denied"
    shard.unlink()
    shard.symlink_to(unet / "nowhere")
    assert complaint(unet) == f"unet/{SHARDS[1]} cannot be read: No such file or directory"
    shard.unlink()
    shard.mkdir()
    assert complaint(unet) == f"unet/{SHARDS[1]} must be a file, and is none"
    shard.rmdir()
    shard.write_bytes(data)
    (unet / INDEX).write_text("[]")
    assert complaint(unet).startswith(f"unet/{INDEX} is damaged: it must be a JSON object")


def test_an_index_that_leads_nowhere(unet: Path) -> None:
    whole: dict[str, str] = json.loads((unet / INDEX).read_text())["weight_map"]
    write_index(unet, whole | {"conv.bias": "model-00003-of-00003.safetensors"})
    assert f"unet/{INDEX} names 3 shards, of which 1 are missing: model-00003-of-" in complaint(unet)
    write_index(unet, whole | {"nobody": SHARDS[1], "none": SHARDS[0]})
    said = f"has 'nobody' in {SHARDS[1]}, where it is not (2 of 7 tensors are lost)"
    assert complaint(unet) == f"unet/{INDEX} {said}"
    write_index(unet, {name: shard for name, shard in whole.items() if name != "scale"})
    assert complaint(unet) == f"unet/{SHARDS[1]} has 'scale', which {INDEX} does not name"


def test_one_tensor_in_two_shards(unet: Path) -> None:
    change(unet, mask=TENSORS["mask"])
    assert complaint(unet) == f"unet/{SHARDS[1]} has 'mask', and so has {SHARDS[0]}"


# whatever else


MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(data=st.data())
def test_no_damage_to_a_header_is_ever_more_than_a_model_error(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed and cut off at random: a ModelError, or everything is found where it was."""
    file = tmp_path / "model.safetensors"
    whole = save(TENSORS, metadata={"format": "pt"})
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    file.write_bytes(whole)
    before = find(tmp_path)
    damaged = bytearray(whole)
    for place, byte in data.draw(st.dictionaries(st.integers(0, end - 1), st.integers(0, 255), max_size=6)).items():
        damaged[place] = byte
    file.write_bytes(damaged[: data.draw(st.one_of(st.none(), st.integers(0, len(whole))))])
    said, after = "", before
    try:
        after = find(tmp_path)
    except ModelError as error:
        said = str(error)
    assert after == before
    assert "\n" not in said
    said.encode()


KEYS = [*TENSORS, "dtype", "shape", "data_offsets", "__metadata__", "\ud800", "²"]
VALUES = [None, True, 7, -1, 10**30, 0.5, float("nan"), "F32", "I64", "\n", "\ud800"]
JSON = st.recursive(
    st.sampled_from(VALUES), lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(KEYS), part)
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F8_E4M3", "BOOL", "F4"]) | JSON,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(0, 9), st.integers(0, 9)) | JSON,
    }
)


@MANY
@given(header=st.dictionaries(st.sampled_from(KEYS), ENTRY, max_size=3) | JSON, size=st.integers(0, 12))
def test_no_header_is_ever_more_than_a_model_error(tmp_path: Path, clip: nn.Module, header: object, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(with_header(header, bytes(size)))
    with pytest.raises(ModelError) as caught:
        find(tmp_path, clip)
    assert "\n" not in str(caught.value)
    str(caught.value).encode()
