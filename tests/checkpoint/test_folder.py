"""check_folder: what it finds, and one clear line for whatever is wrong. The folders are made by hand."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from tightfit.checkpoint import folder as folder_module
from tightfit.checkpoint.folder import ComponentFolder, check_folder
from tightfit.errors import ModelError

UNET = "unet/diffusion_pytorch_model.safetensors"
INDEX = "unet/diffusion_pytorch_model.safetensors.index.json"
TENSORS: dict[str, np.ndarray[Any, Any]] = {  # 128 + 8 bytes
    "conv.weight": np.zeros((4, 8), np.float32),
    "conv.bias": np.zeros(4, np.float16),
}
COMPONENTS: dict[str, list[Any]] = {
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "image_encoder": [None, None],
}


def write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder laid out like Stable Diffusion's, with weights of 136 bytes in each network."""
    root = tmp_path / "model"
    options = {"_class_name": "StableDiffusionPipeline", "requires_safety_checker": True, "layers": [1, 2]}
    write(root / "model_index.json", options | COMPONENTS)
    for name in ("unet", "vae"):
        write(root / name / "config.json", {"_class_name": COMPONENTS[name][1]})
        save_file(TENSORS, root / name / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    for name in ("text_encoder", "safety_checker"):
        write(root / name / "config.json", {"architectures": [COMPONENTS[name][1]]})
        save_file(TENSORS, root / name / "model.safetensors")
    write(root / "tokenizer/tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"})
    write(root / "scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"})
    write(root / "feature_extractor/preprocessor_config.json", {})
    return root


@pytest.fixture
def unet_only(model: Path) -> Path:
    """The same with a single component, for tests of many examples."""
    write(model / "model_index.json", {"_class_name": "UnetPipeline", "unet": COMPONENTS["unet"]})
    return model


def complaint(path: Path) -> str:
    """The one line that check_folder has against `path`."""
    with pytest.raises(ModelError) as caught:
        check_folder(path)
    message = str(caught.value)
    assert "\n" not in message
    json.dumps(caught.value.facts)
    return message


def edit(file: Path, **changes: object) -> None:
    write(file, json.loads(file.read_text()) | changes)


def shard(root: Path, missing: int = 0) -> None:
    """Splits the unet's weights into one shard per tensor, of which the last `missing` are not there."""
    (root / UNET).unlink()
    places = {}
    for number, (name, value) in enumerate(TENSORS.items(), 1):
        places[name] = f"diffusion_pytorch_model-{number:05d}-of-{len(TENSORS):05d}.safetensors"
        if number <= len(TENSORS) - missing:
            save_file({name: value}, root / "unet" / places[name])
    write(root / INDEX, {"metadata": {"total_size": 136}, "weight_map": places})


# what is found


def test_a_whole_folder(model: Path) -> None:
    found = check_folder(model)
    assert (found.path, found.pipeline_class, found.variant) == (model, "StableDiffusionPipeline", None)
    assert [part.name for part in found.components] == [name for name in COMPONENTS if name != "image_encoder"]
    unet = ComponentFolder("unet", "diffusers", "UNet2DConditionModel", (model / UNET,), 136)
    assert found.components[0] == unet
    assert {part.name: part.weight_bytes for part in found.components if not part.weight_files} == {
        "tokenizer": 0, "scheduler": 0, "feature_extractor": 0,
    }  # fmt: skip


def test_shards_are_counted_together(model: Path) -> None:
    shard(model)
    unet = check_folder(model).components[0]
    assert [file.name[-27:] for file in unet.weight_files] == [f"-0000{n}-of-00002.safetensors"[-27:] for n in (1, 2)]
    assert unet.weight_bytes == 136


def test_weights_without_variant_are_preferred(model: Path) -> None:
    save_file({"x": np.zeros(1)}, model / "unet/diffusion_pytorch_model.fp16.safetensors")
    found = check_folder(model)
    assert found.variant is None
    assert found.components[0].weight_files == (model / UNET,)


def test_a_variant_where_there_is_nothing_else(model: Path) -> None:
    (model / UNET).rename(model / "unet/diffusion_pytorch_model.fp16.safetensors")
    found = check_folder(model)
    assert found.variant == "fp16"
    assert found.components[0].weight_files == (model / "unet/diffusion_pytorch_model.fp16.safetensors",)
    assert found.components[1].weight_files == (model / "vae/diffusion_pytorch_model.safetensors",)


def test_a_sharded_variant(model: Path) -> None:
    name = "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"
    (model / UNET).rename(model / "unet" / name)
    index = "unet/diffusion_pytorch_model.safetensors.index.fp16.json"
    write(model / index, {"metadata": {}, "weight_map": dict.fromkeys(TENSORS, name)})
    found = check_folder(model)
    assert (found.variant, found.components[0].weight_files) == ("fp16", (model / "unet" / name,))


def test_variants_that_do_not_go_together(model: Path) -> None:
    (model / UNET).rename(model / "unet/diffusion_pytorch_model.fp16.safetensors")
    (model / "vae/diffusion_pytorch_model.safetensors").rename(model / "vae/diffusion_pytorch_model.ema.safetensors")
    assert "unet is only there as fp16, vae is only there as ema" in complaint(model)


def test_pickles_beside_safetensors_are_left_alone(model: Path) -> None:
    write(model / "unet/diffusion_pytorch_model.bin", "never read")
    assert check_folder(model).components[0].weight_files == (model / UNET,)


def test_neither_torch_nor_diffusers_is_imported(model: Path) -> None:
    """By this module, that is: what `import tightfit` itself brings along is left out."""
    code = (
        "import sys, types, pathlib; sys.modules['tightfit'] = types.ModuleType('tightfit');"
        "sys.modules['tightfit'].__path__ = [sys.argv[1]]; import tightfit.checkpoint.folder as folder;"
        "folder.check_folder(pathlib.Path(sys.argv[2]));"
        "sys.exit(', '.join({'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    package = Path(folder_module.__file__).parent.parent
    command = [sys.executable, "-W", "error", "-c", code, str(package), str(model)]
    assert subprocess.run(command, check=False, capture_output=True, text=True).stderr.strip() == ""


# folders that are no model


def test_no_such_folder(tmp_path: Path) -> None:
    assert f"{tmp_path}/nothing does not exist" in complaint(tmp_path / "nothing")
    assert "cannot be read: embedded null byte" in complaint(Path("a\0b"))


def test_a_file_instead_of_a_folder(model: Path) -> None:
    assert f"{UNET} is a file, not a folder; a folder as pipe.save_pretrained(folder)" in complaint(model / UNET)
    assert "x does not exist" in complaint(model / UNET / "x")


def test_a_folder_that_is_no_model(model: Path) -> None:
    said = complaint(model / "tokenizer")
    assert said.startswith(f"{model}/tokenizer is no model: it has no model_index.json, but tokenizer_config.json;")
    (model / "tokenizer/two\nlines").touch()
    assert "but tokenizer_config.json, two\\nlines;" in complaint(model / "tokenizer")
    (model / "model_index.json").unlink()
    assert "but feature_extractor, safety_checker, scheduler and 4 more" in complaint(model)


BROKEN_JSON = {
    "empty": ("", "is no JSON (0 bytes): Expecting value"),
    "cut short": ('{"_class_name": "Unet', "is no JSON (21 bytes): Unterminated string"),
    "a list": ("[1, 2]", "must be a JSON object, not [1, 2]"),
    "a number": ("NaN", "must be a JSON object, not nan"),
    "too deep": ("[" * 100_000, "is no JSON (100,000 bytes): maximum recursion depth"),
    "a huge number": ('{"a": 1' + "0" * 5000 + "}", "is no JSON (5,008 bytes): Exceeds the limit"),
    "no text": ("\ufeff{}", "is no JSON (5 bytes)"),
}


@pytest.mark.parametrize("file", ["model_index.json", "unet/config.json", "scheduler/scheduler_config.json"])
@pytest.mark.parametrize(("text", "expected"), BROKEN_JSON.values(), ids=BROKEN_JSON)
def test_broken_json(model: Path, file: str, text: str, expected: str) -> None:
    write(model / file, text)
    said = complaint(model)
    assert f"{file} is damaged: it " in said
    assert expected in said


def test_json_that_is_no_text(model: Path) -> None:
    (model / "vae/config.json").write_bytes(b"\xff\xfe{}")
    assert "vae/config.json is damaged: it is no JSON (4 bytes): 'utf-8' codec can't decode" in complaint(model)


@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json"])
def test_no_class_name(model: Path, file: str) -> None:
    content = json.loads((model / file).read_text())
    write(model / file, {name: value for name, value in content.items() if name != "_class_name"})
    assert f"{file} has no _class_name: it must name the class to load" in complaint(model)
    edit(model / file, _class_name=7)
    assert f"{file} has 7 as _class_name" in complaint(model)


def test_no_components(model: Path) -> None:
    write(model / "model_index.json", {"_class_name": "StableDiffusionPipeline", "unet": [None, None]})
    assert "model_index.json names 0 components" in complaint(model)


@pytest.mark.parametrize("entry", ["UNet", {}, ["diffusers"], ["diffusers", None], ["diffusers", "a b"], [1, 2]])
def test_an_entry_that_names_no_class(model: Path, entry: object) -> None:
    edit(model / "model_index.json", unet=entry)
    assert "model_index.json has unet as " in complaint(model)


def test_a_missing_component(model: Path) -> None:
    (model / "scheduler").rename(model / "schedule")
    assert "model/scheduler is missing: model_index.json has scheduler as DDIMScheduler" in complaint(model)


def test_a_component_without_config(model: Path) -> None:
    (model / "vae/config.json").unlink()
    said = complaint(model)
    assert "model/vae has no config.json or other *_config.json for AutoencoderKL" in said
    assert "but diffusion_pytorch_model.safetensors" in said


def test_a_config_that_is_no_file(model: Path) -> None:
    (model / "vae/config.json").unlink()
    (model / "vae/config.json").mkdir()
    assert "vae/config.json must be a file, and is none" in complaint(model)


def test_what_may_not_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root nothing is forbidden, so the system's refusal is made by hand."""

    def refuse(original: Callable[..., Any], target: Path) -> Callable[..., Any]:
        def call(path: Path, *args: Any, **options: Any) -> Any:
            if Path(path) == target:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **options)

        return call

    for owner, name, target in ((Path, "read_bytes", "vae/config.json"), (Path, "open", UNET), (Path, "stat", "vae")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse(getattr(owner, name), model / target))
            assert f"{target} cannot be read: Permission denied" in complaint(model)
    monkeypatch.setattr("os.listdir", refuse(os.listdir, model / "unet"))
    assert "model/unet cannot be read: Permission denied" in complaint(model)


# code in the folder


def test_a_component_with_code_of_its_own(model: Path) -> None:
    edit(model / "model_index.json", unet=["my_unet", "MyUNet"])
    write(model / "unet/my_unet.py", "raise SystemExit('ran')")
    said = complaint(model)
    assert "model_index.json takes unet from python code of its own (unknown library 'my_unet'" in said
    assert "code in a model folder is never run" in said


def test_a_misspelt_library(model: Path) -> None:
    edit(model / "model_index.json", unet=["difusers", "UNet2DConditionModel"])
    assert "unknown library 'difusers': did you mean 'diffusers'?" in complaint(model)


def test_code_under_a_library_name(model: Path) -> None:
    write(model / "unet/diffusers.py", "raise SystemExit('ran')")
    assert "takes unet from python code of its own (unet/diffusers.py)" in complaint(model)


@pytest.mark.parametrize("file", ["model_index.json", "unet/config.json"])
def test_a_class_name_that_points_to_code(model: Path, file: str) -> None:
    edit(model / file, _class_name=["pipeline", "MyPipeline"])
    assert f"{file} names python code (['pipeline', 'MyPipeline'])" in complaint(model)


@pytest.mark.parametrize("file", ["text_encoder/config.json", "tokenizer/tokenizer_config.json"])
def test_auto_map(model: Path, file: str) -> None:
    edit(model / file, auto_map={"AutoModel": "code.MyModel"})
    assert f"{file} names python code ({{'AutoModel': 'code.MyModel'}})" in complaint(model)
    edit(model / file, auto_map=None, parts=[{"text_config": {"auto_map": {"AutoModel": "code.Inner"}}}])
    assert f"{file} names python code ({{'AutoModel': 'code.Inner'}})" in complaint(model)


# weights that are not there


def test_only_pickles(model: Path) -> None:
    (model / UNET).rename(model / "unet/diffusion_pytorch_model.bin")
    said = complaint(model)
    assert "unet/diffusion_pytorch_model.bin is a pickle" in said
    assert "unet has 0 safetensors files: only safetensors are loaded" in said
    assert "pipe.save_pretrained(folder, safe_serialization=True)" in said


@pytest.mark.parametrize("name", ["pytorch_model.pt", "x.pth", "model.ckpt"])
def test_other_pickles(model: Path, name: str) -> None:
    (model / "text_encoder/model.safetensors").rename(model / "text_encoder" / name)
    assert f"text_encoder/{name} is a pickle" in complaint(model)


def test_no_weights(model: Path) -> None:
    (model / UNET).unlink()
    assert complaint(model) == (
        "model/unet has no weights for UNet2DConditionModel, but config.json: "
        "it needs diffusion_pytorch_model.safetensors, or shards and their .index.json"
    )


def test_weights_under_a_name_that_diffusers_does_not_load(model: Path) -> None:
    (model / UNET).rename(model / "unet/model.safetensors")
    assert "but config.json, model.safetensors: it needs diffusion_pytorch_model.safetensors" in complaint(model)


def test_a_missing_shard(model: Path) -> None:
    shard(model, missing=1)
    missing = "diffusion_pytorch_model-00002-of-00002.safetensors"
    assert complaint(model) == f"{INDEX} names 2 shards, of which 1 are missing: {missing}"


@pytest.mark.parametrize("name", ["../vae/x.safetensors", "/etc/passwd", "a.bin", 3, None, "\0.safetensors"])
def test_a_shard_that_is_none(model: Path, name: object) -> None:
    shard(model)
    edit(model / INDEX, weight_map={"a": name})
    assert f"{INDEX} names the shard " in complaint(model)


@pytest.mark.parametrize("changes", [{"weight_map": []}, {"weight_map": {}}, {"weight_map": None}, {"metadata": 1}])
def test_an_index_that_is_none(model: Path, changes: dict[str, object]) -> None:
    shard(model)
    edit(model / INDEX, **changes)
    assert f"{INDEX} is no shard index: it needs the objects weight_map (tensor → shard)" in complaint(model)


def test_an_index_that_is_no_json(model: Path) -> None:
    shard(model)
    write(model / INDEX, "{")
    assert f"{INDEX} is damaged: it is no JSON (1 bytes)" in complaint(model)


# weights that are damaged


def header(content: object, tensors: int = 0) -> bytes:
    """A safetensors file with `content` as its header, JSON unless it is text, and `tensors` bytes after it."""
    text = (content if isinstance(content, str) else json.dumps(content)).encode(errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + bytes(tensors)


def test_truncated_weights_say_how_much_is_there(model: Path) -> None:
    whole = header({"a": {"dtype": "U8", "shape": [12_345_000], "data_offsets": [0, 12_345_000]}})
    (model / UNET).write_bytes(whole + bytes(2_000_000 - len(whole)))
    promised = len(whole) + 12_345_000
    said = complaint(model)
    assert said == f"{UNET} is truncated: its header promises {promised:,} bytes, the file has 2,000,000"


def test_weights_that_are_too_long(model: Path) -> None:
    (model / UNET).write_bytes(save(TENSORS) + b"x")
    size = len(save(TENSORS))
    assert f"{UNET} is corrupt: its header promises {size:,} bytes, the file has {size + 1:,}" in complaint(model)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 40])
def test_a_header_cut_short(model: Path, size: int) -> None:
    (model / UNET).write_bytes(save(TENSORS)[:size])
    said = complaint(model)
    assert f"{UNET} is truncated: its header promises" in said
    assert f"the file has {size}" in said


def test_a_header_length_that_cannot_be(model: Path) -> None:
    (model / UNET).write_bytes(struct.pack("<Q", 2**60) + save(TENSORS))
    assert f"is truncated: its header promises {2**60 + 8:,} bytes" in complaint(model)


def test_a_header_larger_than_is_ever_read(model: Path) -> None:
    """A sparse file: long enough for its header of 150 MB, which is more than safetensors allows."""
    with (model / UNET).open("wb") as stream:
        stream.write(struct.pack("<Q", 150_000_000))
        stream.truncate(200_000_000)
    assert "is corrupt: its header promises 150,000,008 bytes, the file has 200,000,000" in complaint(model)


def test_a_git_lfs_pointer(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    write(model / UNET, pointer)
    assert f"{UNET} is a Git LFS pointer of {len(pointer)} bytes" in complaint(model)


@pytest.mark.parametrize("content", ["[1]", "{", "", "[" * 100_000, '"a"', '{"a": 1' + "0" * 5000 + "}", "\ufeff{}"])
def test_a_header_that_is_no_json_object(model: Path, content: str) -> None:
    (model / UNET).write_bytes(header(content))
    assert f"{UNET} is corrupt: its header " in complaint(model)


NAN = float("nan")
OFFSETS = [None, 3, [], [0], [0, 1, 2], ["0", "1"], [0.0, 1.0], [-1, 4], [4, 0], [0, 10**400], [0, NAN], {"0": 1}]


@pytest.mark.parametrize("offsets", OFFSETS, ids=[str(offsets)[:20] for offsets in OFFSETS])
def test_offsets_that_are_none(model: Path, offsets: object) -> None:
    (model / UNET).write_bytes(header({"conv": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}, tensors=4))
    said = complaint(model)
    assert f"{UNET} is corrupt: its header has 'conv' as " in said
    assert len(said) < 400


@pytest.mark.parametrize("tensor", [None, 3, "x", [], {}, float("inf")])
def test_a_tensor_that_is_none(model: Path, tensor: object) -> None:
    (model / UNET).write_bytes(header({"\ud800 odd": tensor}))
    said = complaint(model)
    assert "without sound data_offsets" in said
    said.encode()


U8 = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
CONTRADICTIONS: dict[str, tuple[object, int, str]] = {
    "overlap": ({"a": U8, "b": U8 | {"data_offsets": [1, 3]}}, 3, "'b' begin within 'a'"),
    "gap": ({"a": U8, "b": U8 | {"data_offsets": [3, 5]}}, 5, "'b' begin 1 bytes after 'a'"),
    "no such dtype": ({"a": U8 | {"dtype": "F4"}}, 2, "has 'a' as 'F4': tensors are read as F64, F32"),
    "huge": ({"a": U8 | {"shape": [10**9, 10**9, 10**9]}}, 2, "'a' with shape [1000000000, 1000000000, 1000000000] of"),
    "negative": ({"a": U8 | {"shape": [-1, -2]}}, 2, "'a' with shape [-1, -2] of 'U8' in 2 bytes"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, 2, "'a' with shape None of 'U8' in 2 bytes"),
    "twice": ('{"a": %s, "a": %s}' % ((json.dumps(U8),) * 2), 2, "'a' is there twice"),
}


@pytest.mark.parametrize(("content", "size", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_header_that_contradicts_itself(model: Path, content: object, size: int, expected: str) -> None:
    """`tightfit plan` reads no more than headers, and refuses what a run would refuse."""
    (model / UNET).write_bytes(header(content, size))
    said = complaint(model)
    assert said.startswith(UNET)
    assert expected in said


MANY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(data=st.data())
def test_no_damage_is_ever_more_than_a_model_error(unet_only: Path, data: st.DataObject) -> None:
    """Truncated at random, bytes of the header changed at random: either nobody can tell, or it is a ModelError."""
    whole = save(TENSORS, metadata={"format": "pt"})
    damaged = bytearray(whole)
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    for place, byte in data.draw(st.dictionaries(st.integers(0, end - 1), st.integers(0, 255), max_size=6)).items():
        damaged[place] = byte
    damaged = damaged[: data.draw(st.one_of(st.none(), st.integers(0, len(whole))))]
    (unet_only / UNET).write_bytes(damaged)
    said = None
    try:
        check_folder(unet_only)
    except ModelError as error:
        said = str(error)
    assert len(damaged) == len(whole) if said is None else said.startswith(UNET)


KEYS = ["_class_name", "unet", "../vae", "auto_map", "weight_map", "metadata", "data_offsets"]
VALUES = [None, True, 7, -1, 10**30, 0.5, float("nan"), "diffusers", "unet", "x/y", "\ud800"]
JSON = st.recursive(
    st.sampled_from(VALUES), lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(KEYS), part)
)


@MANY
@given(file=st.sampled_from(["model_index.json", "unet/config.json", INDEX, UNET]), content=JSON)
def test_no_json_is_ever_more_than_a_model_error(unet_only: Path, file: str, content: object) -> None:
    changed = unet_only / file
    original = changed.read_bytes() if changed.exists() else None
    try:
        changed.write_bytes(header(content) if file == UNET else json.dumps(content).encode())
        check_folder(unet_only)
    except ModelError as error:
        str(error).encode()
    finally:
        changed.unlink()
        if original is not None:
            changed.write_bytes(original)
